// Elements, numbers with units, themes.
const $ = (id) => document.getElementById(id);

const make = (name, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
};

const SVG = "http://www.w3.org/2000/svg";
const draw = (name, attributes = {}, ...children) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (value) => whole.format(value);
const counted = (value, unit) => `${count(value)} ${unit}${value === 1 ? "" : "s"}`;
// Large counts in a tile: exact below a million.
const brief = (value) => (Math.abs(value) < 1e6 ? count(value) : short.format(value));
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}%`;
const times = (factor) => `${factor < 10 ? factor.toFixed(1) : factor.toFixed(0)}×`;

const since = (seconds) => {
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
};
const ago = (seconds) => (seconds < 1 ? "just now" : `${since(seconds)} ago`);
const clock = (time) => new Date(1000 * time).toLocaleTimeString([], { hour12: false });
const moment = (time) => new Date(1000 * time).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });
// A readout is spoken while its picture is explored by keyboard, not when new data comes in.
const spoken = (box, readout) => {
  box.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
  box.addEventListener("blur", () => readout.removeAttribute("aria-live"));
};
const empty = (text) => make("p", { className: "empty", textContent: text });
// "a <b>b</b>" without markup in strings: every other part is bold.
const emphasised = (...parts) => parts.map((part, index) => (index % 2 ? make("b", { textContent: part }) : part));

const stored = (area, name, value) => {
  try {
    if (value === undefined) return area.getItem(name);
    area.setItem(name, value);
  } catch { /* storage may be switched off; the page works without */ }
  return null;
};

const theme = {
  choices: ["auto", "light", "dark"],
  listeners: [],
  choice: stored(localStorage, "laprox-theme") || "auto",
  get dark() { return document.documentElement.dataset.theme === "dark"; },
  apply() {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    document.documentElement.dataset.theme = theme.choice === "auto" ? system : theme.choice;
    $("theme").replaceChildren(make("span", { textContent: "Theme: " }), theme.choice);
    $("theme").setAttribute("aria-label", `Theme: ${theme.choice}`);
    for (const listener of theme.listeners) listener();
  },
  start() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme.apply);
    $("theme").addEventListener("click", () => {
      theme.choice = theme.choices[(theme.choices.indexOf(theme.choice) + 1) % theme.choices.length];
      stored(localStorage, "laprox-theme", theme.choice);
      theme.apply();
    });
    theme.apply();
  },
  colour: (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim(),
};

// A sequential scale whose zero is close to the card: what is not kept recedes.
const HEAT = {
  light: [[236, 241, 243], [160, 217, 208], [52, 160, 156], [14, 94, 116], [11, 37, 69]],
  dark: [[31, 41, 51], [20, 82, 93], [28, 150, 143], [125, 219, 172], [253, 246, 178]],
};
const heatColour = (share) => {
  const stops = theme.dark ? HEAT.dark : HEAT.light;
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const from = Math.min(stops.length - 2, Math.floor(place));
  const mixed = stops[from].map((value, channel) => Math.round(value + (stops[from + 1][channel] - value) * (place - from)));
  return `rgb(${mixed.join(" ")})`;
};
