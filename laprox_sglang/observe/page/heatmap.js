// Layers across, KV heads down: how many entries each list keeps. Below it, which positions of one segment survive.
const heat = {
  kept: null, // [layer][head]
  tokens: 0,
  note: "",
  at: null, // [layer, head] under the cursor
  pinned: null, // [layer, head] whose positions the strip shows
  onPin: () => {},
  shape: "",

  show(kept, tokens, note) {
    Object.assign(heat, { kept, tokens, note });
    heat.draw();
  },
  draw() {
    const box = $("heat"), { kept } = heat;
    $("heat-sub").textContent = heat.note;
    if (!kept || !heat.tokens) {
      heat.shape = "";
      box.removeAttribute("style");
      box.replaceChildren(empty(kept ? "Nothing is compressed yet. A prompt that is long enough is, when its prefill ends." : "Counting …"));
      $("heat-legend").replaceChildren();
      $("heat-readout").textContent = "\u00a0";
      return;
    }
    const layers = kept.length, heads = kept[0].length;
    const highest = Math.max(1, ...kept.flat());
    if (heat.shape !== `${layers}x${heads}`) heat.build(layers, heads);
    for (const cell of box.querySelectorAll(".cell")) {
      const [layer, head] = [Number(cell.dataset.layer), Number(cell.dataset.head)];
      const value = kept[layer][head];
      cell.style.background = heatColour(value / highest);
      cell.setAttribute("aria-label", `layer ${layer}, head ${head}: ${counted(value, "entr").replace(/entrs?$/, value === 1 ? "entry" : "entries")}`);
    }
    const ramp = make("canvas", { width: 120, height: 1 });
    const context = ramp.getContext("2d");
    for (let step = 0; step < 120; step += 1) { context.fillStyle = heatColour(step / 119); context.fillRect(step, 0, 1, 1); }
    $("heat-legend").replaceChildren("0", ramp, `${count(highest)} entries`);
    heat.mark();
  },
  build(layers, heads) {
    const box = $("heat");
    heat.shape = `${layers}x${heads}`;
    box.style.gridTemplateColumns = `auto repeat(${layers}, minmax(var(--least), 1fr))`;
    box.style.setProperty("--cell", heads <= 4 ? "34px" : heads <= 8 ? "24px" : "14px");
    const parts = [];
    for (let head = 0; head < heads; head += 1) {
      const row = make("div");
      row.setAttribute("role", "row");
      row.style.display = "contents";
      row.append(make("span", { className: "label row", textContent: `head ${head}` }));
      for (let layer = 0; layer < layers; layer += 1) {
        const cell = make("div", { className: "cell", id: `cell-${layer}-${head}` });
        cell.setAttribute("role", "gridcell");
        Object.assign(cell.dataset, { layer, head });
        row.append(cell);
      }
      parts.push(row);
    }
    const axis = make("div", {}, make("span", { className: "label row", textContent: "layer" }));
    axis.setAttribute("role", "presentation");
    axis.style.display = "contents";
    const every = layers > 40 ? 10 : layers > 16 ? 5 : 1;
    for (let layer = 0; layer < layers; layer += 1) {
      axis.append(make("span", { className: "label", textContent: layer % every ? "" : String(layer) }));
    }
    box.replaceChildren(...parts, axis);
  },
  cell: (place) => place && $(`cell-${place[0]}-${place[1]}`),
  mark() {
    for (const cell of $("heat").querySelectorAll(".at, .pinned")) cell.classList.remove("at", "pinned");
    heat.cell(heat.pinned)?.classList.add("pinned");
    heat.cell(heat.at)?.classList.add("at");
    const place = heat.at ?? heat.pinned;
    if (heat.at) $("heat").setAttribute("aria-activedescendant", `cell-${heat.at[0]}-${heat.at[1]}`);
    else $("heat").removeAttribute("aria-activedescendant");
    if (!heat.kept || !heat.tokens) return;
    if (!place) {
      const all = heat.kept.flat(), total = all.reduce((sum, value) => sum + value, 0);
      const idle = all.filter((value) => value < 0.02 * heat.tokens).length;
      $("heat-readout").replaceChildren(...emphasised("Mean ", `${count(total / all.length)} entries`, ` per head of ${counted(heat.tokens, "token")}; most `, count(Math.max(...all)), ", least ", count(Math.min(...all)), `. ${counted(idle, "head")} of ${all.length} ${idle === 1 ? "keeps" : "keep"} less than 2%.`));
      return;
    }
    const value = heat.kept[place[0]]?.[place[1]];
    if (value === undefined) return;
    $("heat-readout").replaceChildren(...emphasised(`Layer ${place[0]}, head ${place[1]} keeps `, count(value), ` of ${counted(heat.tokens, "token")} (`, percent(value / heat.tokens, 1), ")."));
  },
  move(place) {
    if (!heat.kept) return;
    const clamp = (value, end) => Math.min(end - 1, Math.max(0, value));
    heat.at = place && [clamp(place[0], heat.kept.length), clamp(place[1], heat.kept[0].length)];
    heat.mark();
    heat.cell(heat.at)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  },
  pin(place) {
    const same = place && heat.pinned && place.join() === heat.pinned.join();
    heat.pinned = same ? null : place;
    heat.mark();
    heat.onPin();
  },
  start() {
    const box = $("heat");
    spoken(box, $("heat-readout"));
    const placeOf = (target) => target.dataset?.layer && [Number(target.dataset.layer), Number(target.dataset.head)];
    box.addEventListener("pointerover", (event) => { const place = placeOf(event.target); if (place) { heat.at = place; heat.mark(); } });
    box.addEventListener("pointerleave", () => { heat.at = null; heat.mark(); });
    box.addEventListener("click", (event) => { const place = placeOf(event.target); if (place) heat.pin(place); });
    box.addEventListener("blur", () => heat.move(null));
    box.addEventListener("keydown", (event) => {
      if (!heat.kept || !heat.tokens) return;
      const [layer, head] = heat.at ?? heat.pinned ?? [-1, 0];
      const to = { ArrowLeft: [layer - 1, head], ArrowRight: [layer + 1, head], ArrowUp: [layer, head - 1], ArrowDown: [layer, head + 1], Home: [0, head], End: [heat.kept.length - 1, head] }[event.key];
      if (to) heat.move(to);
      else if ((event.key === "Enter" || event.key === " ") && heat.at) heat.pin(heat.at);
      else if (event.key === "Escape") { heat.pinned = null; heat.move(null); heat.onPin(); }
      else return;
      event.preventDefault();
    });
    theme.listeners.push(heat.draw);
  },
};

const strip = {
  data: null, // schema.SegmentDetail
  at: null, // bin under the cursor

  show(detail) { strip.data = detail; strip.at = null; strip.draw(); },
  draw() {
    const box = $("strip"), canvas = box.firstElementChild, data = strip.data;
    const scale = devicePixelRatio || 1, width = box.clientWidth, height = box.clientHeight;
    if (!width) return;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const first = data?.segment.start ?? 0;
    $("strip-first").textContent = data ? `token ${count(first)}` : "";
    $("strip-last").textContent = data ? `token ${count(first + data.segment.tokens - 1)}` : "";
    if (!data?.strip) { $("strip-readout").textContent = "\u00a0"; return; }
    const { share } = data.strip, step = width / share.length;
    const highest = Math.max(0.0001, ...share);
    context.fillStyle = theme.colour("--accent");
    share.forEach((value, bin) => {
      const tall = value > 0 ? Math.max(1, (value / highest) * (height - 6)) : 0;
      context.fillRect(bin * step, height - tall, Math.max(step - (step > 4 ? 1 : 0), 0.6), tall);
    });
    if (strip.at !== null) {
      context.fillStyle = theme.colour("--ink");
      context.fillRect((strip.at + 0.5) * step - 0.5, 0, 1, height);
    }
    strip.read();
  },
  read() {
    const { segment, strip: found } = strip.data;
    const which = strip.data.layer === null ? "all heads" : `layer ${strip.data.layer}, head ${strip.data.head}`;
    if (strip.at === null) {
      const none = found.share.filter((value) => value === 0).length, highest = Math.max(...found.share);
      $("strip-readout").replaceChildren(...emphasised(`${counted(segment.tokens, "token")}, ${which}; the tallest bar is `, percent(highest), ` of the entries kept. A bar is ${counted(found.tokens_per_bin, "token")} wide; nothing is left in `, `${count(none)} of ${counted(found.share.length, "bar")}`, "."));
      return;
    }
    const first = strip.at * found.tokens_per_bin, last = Math.min(segment.tokens, first + found.tokens_per_bin) - 1;
    const base = segment.start ?? 0;
    const place = first === last ? `Token ${count(base + first)}` : `Tokens ${count(base + first)} to ${count(base + last)}`;
    $("strip-readout").replaceChildren(...emphasised(`${place}, ${which}: `, percent(found.share[strip.at], 1), " of the entries kept."));
  },
  move(bin) {
    if (!strip.data?.strip) return;
    strip.at = bin === null ? null : Math.min(strip.data.strip.share.length - 1, Math.max(0, bin));
    strip.draw();
  },
  start() {
    const box = $("strip");
    spoken(box, $("strip-readout"));
    box.addEventListener("pointermove", (event) => {
      if (!strip.data?.strip) return;
      const place = event.clientX - box.getBoundingClientRect().left;
      strip.move(Math.floor((place / box.clientWidth) * strip.data.strip.share.length));
    });
    box.addEventListener("pointerleave", () => strip.move(null));
    box.addEventListener("blur", () => strip.move(null));
    box.addEventListener("keydown", (event) => {
      if (!strip.data?.strip) return;
      const from = strip.at ?? -1, end = strip.data.strip.share.length - 1;
      const to = { ArrowLeft: from - 1, ArrowRight: from + 1, PageUp: from - 20, PageDown: from + 20, Home: 0, End: end, Escape: null }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      strip.move(to);
    });
    theme.listeners.push(strip.draw);
    new ResizeObserver(strip.draw).observe(box);
  },
};
