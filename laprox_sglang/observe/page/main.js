// Joins the parts: what is asked for when, and what the states of the connection look like.
const state = {
  replica: 0,
  stats: null,
  maps: [],
  detail: null,
  version: "", // of what the lists show: they are fetched again when it changes
  stream: null, // AbortController
  heard: 0, // when the last event came
};
const REFRESH = 2000; // milliseconds between fetches of the lists, at least
const RETRY = 2000;

const setStatus = (kind, text) => {
  $("status").className = `status ${kind}`;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
};

const ofReplica = (reply) => reply.replicas.find((each) => each.replica === state.replica) ?? reply.replicas[0];

const onStats = (stats) => {
  state.stats = stats;
  tiles.show(stats);
};

const onLive = (live) => {
  const stats = ofReplica(live);
  onStats(stats);
  chart.add({ time: live.time, slots: stats.slots_held, tokens: stats.tokens_cached });
  chart.follow();
  feed.add(live.compressions.filter((each) => each.replica === stats.replica), true);
  const version = [stats.compressions, stats.splits, stats.segments, stats.prompt_tokens, stats.nodes.dense].join();
  if (version !== state.version) {
    state.version = version;
    refresh();
  }
};

const showHeat = () => {
  const one = state.detail && $("show-one").getAttribute("aria-pressed") === "true";
  if (one) {
    const { segment } = state.detail;
    heat.show(segment.kept, segment.tokens, `Segment #${segment.id}: of its ${counted(segment.tokens, "token")}, how many entries each KV head of each layer keeps. One budget for the whole model: heads that retrieve keep most, idle heads almost nothing.`);
  } else {
    const map = state.maps.find((each) => each.replica === state.replica);
    heat.show(map?.kept ?? null, map?.tokens ?? 0, `Of all ${counted(map?.tokens ?? 0, "compressed token")} in the tree, how many entries each KV head of each layer keeps. One budget for the whole model: heads that retrieve keep most, idle heads almost nothing.`);
  }
};

const showDetail = async () => {
  const id = segments.chosen;
  if (id !== null) {
    const list = heat.pinned ? `&layer=${heat.pinned[0]}&head=${heat.pinned[1]}` : "";
    try {
      state.detail = await client.json(`segment?id=${id}&replica=${state.replica}${list}`);
    } catch (error) {
      if (error.status !== 404) throw error;
      segments.chosen = null; // split, evicted or flushed since
    }
  }
  if (segments.chosen === null) state.detail = null;
  $("show-one").disabled = !state.detail;
  if (!state.detail) setSwitch(false);
  $("strip-sub").textContent = state.detail
    ? `Segment #${state.detail.segment.id}, first token to the left. Height: share of entries kept at that position. ${heat.pinned ? "Press Escape on the map to see all heads again." : "Choose a cell of the map to see one head's positions."}`
    : "Choose a segment below to see which of its tokens are still in the cache.";
  showHeat();
  strip.show(state.detail);
  segments.draw();
  talks.draw();
};

const setSwitch = (one) => {
  $("show-one").setAttribute("aria-pressed", one);
  $("show-all").setAttribute("aria-pressed", !one);
};

const choose = (id) => {
  segments.chosen = id;
  setSwitch(id !== null);
  guarded(showDetail);
};

const fetchLists = async () => {
  const [found, paths, maps] = await Promise.all([
    client.json(`segments?order=${segments.order}&limit=20`), client.json("conversations"), client.json("map"),
  ]);
  state.maps = maps.replicas;
  segments.show(ofReplica(found));
  talks.show(ofReplica(paths));
  // So that the strip shows something at once.
  if (segments.chosen === null && !state.touched && segments.items.length) segments.chosen = segments.items[0].id;
  await showDetail();
};

let refreshing = false, again = false;
const refresh = () => {
  if (refreshing) { again = true; return; }
  refreshing = true;
  guarded(fetchLists).finally(() => setTimeout(() => {
    refreshing = false;
    if (again) { again = false; refresh(); }
  }, REFRESH));
};

const fetchHistory = async () => {
  const history = ofReplica(await client.json("history"));
  chart.reset(history.samples);
  chart.draw();
  feed.items = [];
  feed.add(history.compressions, false);
};

const load = async () => {
  const stats = await client.json("stats");
  $("model").textContent = stats.model;
  document.title = `LaProx cache: ${stats.model}`;
  const choice = $("replica");
  if (choice.options.length !== stats.replicas.length) choice.replaceChildren(...stats.replicas.map((each) => make("option", { value: each.replica, textContent: each.replica })));
  $("replica-choice").hidden = stats.replicas.length < 2;
  $("sign-in").hidden = true;
  $("board").hidden = false;
  onStats(ofReplica(stats));
  await fetchHistory();
  refresh();
};

const askForKey = (wrong) => {
  state.stream?.abort();
  $("board").hidden = true;
  $("sign-in").hidden = false;
  $("key-error").textContent = wrong ? "The server did not accept this key." : "";
  setStatus("lost", "Key needed");
  $("key").focus();
};

// Runs an action; errors become a state of the page.
const guarded = async (action) => {
  try {
    await action();
    return true;
  } catch (error) {
    if (error instanceof KeyNeeded) askForKey(client.key !== "");
    else if (error.name !== "AbortError") setStatus("lost", error instanceof TypeError ? "No connection, trying again" : error.message);
    return false;
  }
};

const follow = async () => {
  if (state.stream || document.hidden) return;
  const stream = (state.stream = new AbortController());
  const fine = await guarded(async () => {
    await load();
    await client.listen(stream.signal, (event, data) => {
      state.heard = Date.now();
      if (event === "live") {
        setStatus("live", "Live");
        onLive(JSON.parse(data));
      } else if (event === "waiting") setStatus("", data);
    });
    setStatus("lost", "The server ended the connection, trying again");
  });
  if (state.stream === stream) state.stream = null;
  const paused = stream.signal.aborted;
  if (!paused || fine) setTimeout(follow, RETRY);
};

theme.start();
chart.start();
heat.start();
strip.start();
segments.start();
heat.onPin = () => guarded(showDetail);
segments.onChoose = talks.onChoose = (id) => { state.touched = true; choose(id); };
segments.onOrder = () => guarded(fetchLists);
$("show-all").addEventListener("click", () => { setSwitch(false); showHeat(); });
$("show-one").addEventListener("click", () => { setSwitch(true); showHeat(); });
$("replica").addEventListener("change", (event) => {
  state.replica = Number(event.target.value);
  segments.chosen = null;
  guarded(async () => { await fetchHistory(); await fetchLists(); });
});
$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  client.key = $("key").value;
  stored(sessionStorage, "laprox-key", client.key);
  follow();
});
// A link carries no key: where one is needed the data is fetched and opened.
document.querySelector("footer").addEventListener("click", (event) => {
  const path = event.target.getAttribute("href");
  if (!path || !client.key) return;
  event.preventDefault();
  guarded(async () => {
    const reply = await client.request(path.replace("laprox/", ""));
    open(URL.createObjectURL(await reply.blob()));
  });
});
// Nobody looks: nobody asks.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    state.stream?.abort();
    state.stream = null;
    setStatus("", "Paused");
  } else follow();
});
setInterval(() => {
  if (state.stream && state.heard && Date.now() - state.heard > 5000 && $("status").classList.contains("live")) {
    setStatus("", `The scheduler is busy; no news for ${Math.round((Date.now() - state.heard) / 1000)} s`);
  }
}, 1000);
follow();
