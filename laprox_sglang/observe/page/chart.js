// Slots held against what stock would hold, over time. Steps: the cache stays as it is until something happens.
const chart = {
  points: [], // {time, slots, tokens}
  KEEP: 3600, // points; seconds, while the page is open
  at: null, // index under the cursor
  moved: true, // the last point says something new
  drawn: 0, // when
  MARGIN: { left: 52, right: 12, top: 8, bottom: 24 },

  add(point) {
    const { points } = chart;
    const last = points.at(-1);
    if (last && point.time <= last.time) return;
    // What stays the same needs its two ends only.
    chart.moved = !last || last.slots !== point.slots || last.tokens !== point.tokens;
    const before = points.at(-2);
    const same = (a, b) => a.slots === b.slots && a.tokens === b.tokens;
    if (before && same(before, last) && same(last, point)) points.pop();
    points.push(point);
    if (points.length > chart.KEEP) points.splice(0, points.length - chart.KEEP);
  },
  reset(points) { chart.points = []; chart.at = null; points.forEach(chart.add); },

  draw() {
    const box = $("chart");
    const { points, MARGIN } = chart;
    if (!points.length) { box.replaceChildren(empty("Waiting for the first sample …")); return; }
    const width = box.clientWidth, height = box.clientHeight;
    if (!width) return;
    const end = points.at(-1).time, start = Math.min(points[0].time, end - 60);
    const highest = niceEnd(Math.max(...points.map((point) => Math.max(point.tokens, point.slots)), 100));
    const x = (time) => MARGIN.left + ((time - start) / (end - start)) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => height - MARGIN.bottom - (value / highest) * (height - MARGIN.top - MARGIN.bottom);
    const steps = (name) => points.map((point, index) => {
      const [px, py] = [x(point.time).toFixed(1), y(point[name]).toFixed(1)];
      return index ? `H${px}V${py}` : `M${px} ${py}`;
    }).join("");
    const back = (name) => points.map((_, index) => points[points.length - 1 - index]).map((point, index, all) => {
      const [px, py] = [x(point.time).toFixed(1), y(point[name]).toFixed(1)];
      return index === 0 ? `L${px} ${py}` : `V${py}H${px}`;
    }).join("");
    const bottom = y(0).toFixed(1), first = x(points[0].time).toFixed(1), last = x(end).toFixed(1);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (let step = 0; step <= 4; step += 1) {
      const value = (highest * step) / 4, place = y(value);
      svg.append(
        draw("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: place, y2: place }),
        draw("text", { x: MARGIN.left - 8, y: place + 4, "text-anchor": "end" }, brief(value)),
      );
    }
    const labels = width > 520 ? 5 : 3;
    for (let index = 0; index < labels; index += 1) {
      const time = start + ((end - start) * index) / (labels - 1);
      const anchor = index === 0 ? "start" : index === labels - 1 ? "end" : "middle";
      svg.append(draw("text", { x: x(time), y: height - 6, "text-anchor": anchor }, end - start > 43200 ? moment(time) : clock(time)));
    }
    svg.append(
      draw("path", { class: "saved", d: `${steps("tokens")}${back("slots")}Z` }),
      draw("path", { class: "area", d: `${steps("slots")}L${last} ${bottom}L${first} ${bottom}Z` }),
      draw("path", { class: "stock", d: steps("tokens") }),
      draw("path", { class: "held", d: steps("slots") }),
    );
    if (chart.at !== null && points[chart.at]) {
      const place = x(points[chart.at].time);
      svg.append(draw("line", { class: "cursor", x1: place, x2: place, y1: MARGIN.top, y2: height - MARGIN.bottom }));
    }
    chart.timeAt = (px) => start + ((px - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (end - start);
    chart.drawn = Date.now();
    box.replaceChildren(svg);
    box.dataset.points = points.length;
    chart.read();
  },

  // For a live point: nothing that moves costs a drawing each second for nothing.
  follow() { if (chart.moved || Date.now() - chart.drawn > 5000) chart.draw(); },

  read() {
    const point = chart.points[chart.at ?? chart.points.length - 1];
    if (!point) return;
    const when = chart.at === null ? "Now" : clock(point.time);
    $("chart-readout").replaceChildren(...emphasised(`${when}: `, counted(point.slots, "slot"), " held, ", count(point.tokens), " without compression."));
  },
  move(index) {
    chart.at = index === null ? null : Math.min(chart.points.length - 1, Math.max(0, index));
    chart.draw();
  },
  start() {
    const box = $("chart");
    spoken(box, $("chart-readout"));
    box.addEventListener("pointermove", (event) => {
      if (!chart.timeAt || !chart.points.length) return;
      const time = chart.timeAt(event.clientX - box.getBoundingClientRect().left);
      const index = chart.points.findLastIndex((point) => point.time <= time);
      chart.move(Math.max(0, index));
    });
    box.addEventListener("pointerleave", () => chart.move(null));
    box.addEventListener("blur", () => chart.move(null));
    box.addEventListener("keydown", (event) => {
      const from = chart.at ?? chart.points.length - 1;
      const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: chart.points.length - 1, Escape: null }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      chart.move(to);
    });
    new ResizeObserver(chart.draw).observe(box);
  },
};

// The least round number of at least `value` whose quarters are round too.
const niceEnd = (value) => {
  for (let unit = 4; ; unit *= 10) for (const factor of [1, 2, 5]) if (unit * factor >= value) return unit * factor;
};
