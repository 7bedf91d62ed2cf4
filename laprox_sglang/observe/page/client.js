// Talks to the server: JSON with the key, and the event stream (fetch, because EventSource sends no headers).
class KeyNeeded extends Error {}

const client = {
  key: stored(sessionStorage, "laprox-key") || "",
  headers() { return client.key ? { Authorization: `Bearer ${client.key}` } : {}; },
  async request(path, options = {}) {
    const reply = await fetch(`laprox/${path}`, { ...options, headers: client.headers() });
    if (reply.status === 401) throw new KeyNeeded();
    if (!reply.ok) {
      const text = await reply.text();
      let reason = text;
      try { reason = JSON.parse(text).message || text; } catch { /* not JSON */ }
      throw Object.assign(new Error(`${reply.status}: ${reason}`), { status: reply.status });
    }
    return reply;
  },
  async json(path) { return (await client.request(path)).json(); },

  // Calls on(event, data) for every event until the stream ends or the signal aborts it.
  async listen(signal, on) {
    const reply = await client.request("events", { signal });
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let event = "message", data = "";
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) event = line.slice(7);
          if (line.startsWith("data: ")) data += line.slice(6);
        }
        if (data) on(event, data);
      }
    }
  },
};
