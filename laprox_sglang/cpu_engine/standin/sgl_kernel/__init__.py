"""Stand-in for SGLang's CUDA-only kernel package, used by ``laprox_sglang.cpu_engine`` on machines without a GPU.

SGLang 0.5.23's CPU path imports the names below at module level but calls them only for speculative decoding and
bulk copies of the KV cache, so each raises when called. Every other name is missing on purpose: where SGLang
asks for one it catches the ImportError and has a fallback of its own.
"""

LAPROX_STANDIN = True
__version__ = "0.0.0"

NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


def _missing(name):
    def call(*args, **kwargs):
        raise RuntimeError(
            f"sgl_kernel.{name} was called, but SGLang's kernel package cannot load on this machine (no CUDA device) "
            "and laprox_sglang's stand-in has no kernels; turn off the feature that needs it (speculative decoding or "
            "hierarchical cache), or use a machine with a CUDA device"
        )

    call.__name__ = call.__qualname__ = name
    return call


globals().update({name: _missing(name) for name in NAMES})


def __getattr__(name):
    raise AttributeError(f"laprox_sglang's stand-in for sgl_kernel (no CUDA device here) has no {name!r}")
