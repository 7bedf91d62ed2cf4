"""Shows what the cache does: endpoints and a page in SGLang's own HTTP server, metrics, ``laprox-sglang top``.

In the scheduler process: ``journal``, ``kept``, ``metrics`` (told by the cache), ``catalogue`` (lists the tree),
``aside`` (a thread for what would take long) and ``answers``. In the HTTP process: ``channel`` (asks the schedulers),
``endpoints``, ``live``, ``sign_in``, ``page``. ``schema`` is what the two and every client agree on.
"""
