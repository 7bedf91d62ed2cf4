// Headline, tiles, the feed of compressions, segments and conversations.
const KINDS = { prompt: "prompt", answer: "finished answer", rescore: "growing answer", pressure: "memory was needed" };
const tiles = {
  show(stats) {
    const { slots_held: held, slots_saved: saved, tokens_cached: tokens } = stats;
    const headline = $("headline");
    if (!tokens) {
      headline.textContent = "The cache is empty. Send a prompt, and watch what is kept of it.";
    } else if (!saved) {
      headline.replaceChildren(`Holding ${counted(tokens, "token")}, all of them dense. `, `A stretch of ${stats.min_tokens} new tokens or more is compressed.`);
    } else {
      headline.replaceChildren("Holding ", make("strong", { textContent: counted(tokens, "token") }), " in ", make("strong", { textContent: counted(held, "slot") }), `, ${times(tokens / held)} less memory than without compression.`);
    }
    $("held").textContent = brief(held);
    $("held").title = count(held);
    $("held-note").textContent = `slots of ${brief(stats.slots_total)}, ${percent(held / stats.slots_total, 1)}`;
    $("held-meter").style.width = percent(Math.min(1, held / stats.slots_total), 1);
    $("saved").textContent = brief(saved);
    $("saved").title = count(saved);
    $("saved-note").textContent = stats.segment_tokens ? `slots; ${counted(stats.segment_tokens, "token")} compressed to ${percent(stats.segment_slots / stats.segment_tokens)}` : "slots";
    $("hits").textContent = stats.prompt_tokens ? percent(stats.cached_tokens / stats.prompt_tokens, 1) : "–";
    $("hits-note").textContent = stats.prompt_tokens ? `${brief(stats.cached_tokens)} of ${brief(stats.prompt_tokens)} prompt tokens` : "no prompt yet";
    const seconds = stats.compress_seconds + stats.rescore_seconds + stats.finish_seconds;
    $("count").textContent = brief(stats.compressions);
    $("count-note").textContent = stats.compressions ? `${Math.round((1000 * seconds) / stats.compressions)} ms each; ${counted(stats.rescores, "rescoring")} of answers` : "none yet";
    const size = stats.budget_tokens ? `${stats.budget_tokens} entries per head` : `ratio ${stats.ratio}`;
    $("settings").textContent = `${size}, score ${stats.score}, allocation ${stats.allocation}, window ${stats.window}, sink ${stats.sink}, at least ${stats.min_tokens} tokens, pooling ${stats.pool_kernel}. ${stats.layers} layers × ${stats.kv_heads} KV heads. Tree: ${counted(stats.nodes.dense, "dense node")} (${stats.nodes.held_back} scored), ${count(stats.nodes.compressed)} compressed; ${counted(stats.splits, "split")}.`;
    $("refused").textContent = stats.refused_modes.join(", ");
  },
};

const feed = {
  items: [],
  LENGTH: 60,
  add(compressions, fresh) {
    const known = new Set(feed.items.map((item) => item.number));
    const added = compressions.filter((item) => !known.has(item.number));
    feed.items = [...added.map((item) => ({ ...item, fresh })).reverse(), ...feed.items].slice(0, feed.LENGTH);
    if (added.length || !feed.items.length) feed.draw();
  },
  draw() {
    if (!feed.items.length) { $("feed").replaceChildren(make("li", { className: "empty", textContent: "None yet. They appear here while requests run." })); return; }
    $("feed").replaceChildren(...feed.items.map((item) => {
      const row = make("li", { className: item.fresh ? "fresh" : "" },
        make("b", { textContent: `${count(item.tokens)} → ${counted(item.slots, "slot")}` }),
        make("b", { className: "less", textContent: `−${count(item.freed)}` }),
        make("span", { textContent: `${KINDS[item.kind]}, tokens ${count(item.start)} to ${count(item.start + item.tokens - 1)}` }),
        make("span", { textContent: clock(item.time) }));
      item.fresh = false;
      return row;
    }));
  },
};

const segments = {
  items: [],
  order: "largest",
  chosen: null, // id
  onChoose: () => {},
  onOrder: () => {},

  show(found) {
    segments.items = found.segments;
    const some = found.scanned < found.nodes ? ` Looked at the newest ${count(found.scanned)} of ${count(found.nodes)} nodes.` : "";
    $("segments-sub").textContent = `Compressed stretches that the radix tree holds.${some}`;
    segments.draw();
  },
  draw() {
    const body = $("segments"), focused = document.activeElement?.dataset?.segment;
    if (!segments.items.length) {
      const cell = make("td", { colSpan: 7 }, empty("No segment yet."));
      body.replaceChildren(make("tr", {}, cell));
      return;
    }
    body.replaceChildren(...segments.items.map((item) => {
      const chosen = item.id === segments.chosen;
      const choose = make("button", { type: "button", textContent: `#${item.id}`, title: "Show which of its entries are kept" });
      choose.dataset.segment = item.id;
      choose.setAttribute("aria-pressed", chosen);
      choose.addEventListener("click", () => segments.onChoose(chosen ? null : item.id));
      const cells = [item.start === null ? "?" : count(item.start), count(item.tokens), count(item.slots), percent(item.ratio, 1), count(item.hits), since(item.age)];
      return make("tr", { className: chosen ? "chosen" : "" }, make("td", {}, choose), ...cells.map((text, index) => make("td", { textContent: text, className: index ? "" : "long" })));
    }));
    if (focused) body.querySelector(`[data-segment="${focused}"]`)?.focus();
  },
  start() {
    const buttons = [...document.querySelectorAll("[data-order]")];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        segments.order = button.dataset.order;
        for (const each of buttons) each.setAttribute("aria-pressed", each === button);
        segments.onOrder();
      });
    }
  },
};

const STATES = { compressed: "compressed", held_back: "scored, still dense", dense: "dense" };
const talks = {
  items: [],
  open: new Set(),
  onChoose: () => {},

  show(found) { talks.items = found.conversations; talks.draw(); },
  draw() {
    const box = $("talks"), focused = document.activeElement?.dataset?.stretch;
    if (!talks.items.length) { box.replaceChildren(make("li", {}, empty("No conversation yet."))); return; }
    const longest = Math.max(...talks.items.map((talk) => talk.tokens));
    box.replaceChildren(...talks.items.map((talk) => {
      const bar = make("div", { className: "bar" });
      bar.style.width = percent(talk.tokens / longest, 2);
      const history = make("ol");
      for (const part of talk.stretches) {
        const chosen = part.kind === "compressed" && part.id === segments.chosen;
        const kept = part.kind === "compressed" ? `${counted(part.slots, "slot")} (${percent(part.slots / part.tokens)})` : `${counted(part.slots, "slot")}`;
        const text = `tokens ${count(part.start)} to ${count(part.start + part.tokens - 1)}: ${STATES[part.kind]}, ${kept}, ${counted(part.hits, "request")}, ${ago(part.age)}`;
        const button = make("button", { type: "button", className: `${part.kind}${chosen ? " chosen" : ""}`, title: text });
        button.style.flexGrow = part.tokens;
        button.dataset.stretch = `${talk.id}-${part.id}`;
        button.setAttribute("aria-label", text);
        if (part.kind === "compressed") {
          button.setAttribute("aria-pressed", chosen);
          button.addEventListener("click", () => talks.onChoose(chosen ? null : part.id));
        } else button.disabled = true;
        bar.append(button);
        history.append(make("li", { textContent: text }));
      }
      const details = make("details", { open: talks.open.has(talk.id) }, make("summary", { textContent: `History: ${counted(talk.stretches.length, "stretch").replace("stretchs", "stretches")}` }), history);
      details.addEventListener("toggle", () => (details.open ? talks.open.add(talk.id) : talks.open.delete(talk.id)));
      const what = make("div", { className: "what" },
        make("span", {}, ...emphasised("", counted(talk.tokens, "token"), ` in ${counted(talk.slots, "slot")}`, talk.truncated ? " (end of a longer one)" : "")),
        make("span", { textContent: `used ${ago(talk.idle)}` }));
      return make("li", {}, what, bar, details);
    }));
    if (focused) box.querySelector(`[data-stretch="${focused}"]`)?.focus();
  },
};
