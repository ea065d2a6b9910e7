// The page's data: the document, updated by deltas from one EventSource. After a gap the whole document is fetched again.

const MAX_EVENTS = 10_000;
const MAX_ENTRIES = 300;
const SILENCE_MS = 16_000;
const RETRY_MS = [500, 1000, 2000, 5000];

export class Store {
  /** @param onChange called with the set of parts that changed, where "link" stands for the connection. */
  constructor(onChange) {
    this.document = null;
    this.link = "connecting";
    this.lostAt = null;
    this.skew = 0;
    this.onChange = onChange;
    this.source = null;
    this.receivedAt = 0;
    this.brokerAt = performance.now();
    this.failures = 0;
    this.loading = false;
    setInterval(() => this.checkSilence(), 2000);
    document.addEventListener("visibilitychange", () => document.hidden || this.checkSilence());
  }

  /** Seconds since 1970 on the coordinator's clock, up to the network delay. */
  now() {
    return Date.now() / 1000 + this.skew;
  }

  /** Seconds since the coordinator's last message from the broker, or since our last one from the coordinator. */
  quietSeconds() {
    return (performance.now() - this.brokerAt) / 1000;
  }

  async load() {
    if (this.loading) return;
    this.loading = true;
    this.close();
    try {
      const answer = await fetch("now", { cache: "no-store", signal: AbortSignal.timeout(15_000) });
      if (answer.status === 401) return location.reload();
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const fresh = await answer.json();
      this.skew = Date.parse(fresh.at) / 1000 - Date.now() / 1000;
      this.setQuiet(fresh.quiet_s);
      fresh.events = this.joinEvents(fresh);
      this.document = fresh;
      this.onChange(new Set(["all"]));
      this.listen(fresh.position);
    } catch (error) {
      console.info("ftd: no answer:", error.message);
      this.setLost();
      setTimeout(() => this.load(), RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)]);
    } finally {
      this.loading = false;
    }
  }

  /** Keeps older events that were loaded before, if there is no gap between them and the new ones. */
  joinEvents(fresh) {
    const before = this.document;
    if (!before || !fresh.events.length || before.run !== fresh.run) return fresh.events;
    const first = fresh.events[0].n;
    const known = before.events;
    if (!known.length || known[known.length - 1].n < first - 1) return fresh.events;
    return [...known.filter((e) => e.n < first), ...fresh.events];
  }

  listen(position) {
    const source = new EventSource(`stream?after=${encodeURIComponent(position)}`);
    this.source = source;
    this.receivedAt = performance.now();
    source.onopen = () => this.received();
    source.onmessage = (message) => {
      this.received();
      this.apply(JSON.parse(message.data));
    };
    source.addEventListener("heartbeat", (message) => {
      this.received();
      this.setQuiet(JSON.parse(message.data).quiet_s);
    });
    source.addEventListener("reload", () => this.load());
    source.onerror = () => {
      this.setLost();
      if (source.readyState === EventSource.CLOSED && this.source === source) {
        setTimeout(() => this.load(), RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)]);
      }
    };
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  received() {
    this.receivedAt = performance.now();
    this.failures = 0;
    if (this.link !== "live") {
      this.link = "live";
      this.lostAt = null;
      this.onChange(new Set(["link"]));
    }
  }

  setQuiet(quietS) {
    this.brokerAt = performance.now() - 1000 * quietS;
  }

  setLost() {
    if (this.link === "lost") return;
    this.link = "lost";
    this.lostAt = Date.now() / 1000;
    this.onChange(new Set(["link"]));
  }

  /** Detects a dead connection: the server sends a heartbeat every two seconds. */
  checkSilence() {
    if (this.source && performance.now() - this.receivedAt > SILENCE_MS) {
      this.setLost();
      this.load();
    }
  }

  apply({ quiet_s: quietS, ...delta }) {
    const known = this.document;
    this.setQuiet(quietS);
    const changed = new Set(Object.keys(delta));
    if (delta.state) Object.assign(known.state, delta.state);
    if (delta.state?.pipelines) changed.add("pipelines");
    for (const [name, node] of Object.entries(delta.nodes ?? {})) {
      if (node === null) delete known.nodes[name];
      else known.nodes[name] = node;
    }
    if (delta.events) {
      const next = (known.events.at(-1)?.n ?? delta.events[0].n - 1) + 1;
      if (delta.events[0].n > next) return this.load();
      for (const event of delta.events) if (event.n >= next) known.events.push(event);
      if (known.events.length > MAX_EVENTS) known.events.splice(0, known.events.length - MAX_EVENTS);
    }
    if (delta.trend) {
      known.trend[1].length = Math.min(known.trend[1].length, delta.trend[0]);
      known.trend[1].push(...delta.trend[1]);
    }
    for (const part of ["marks", "recoveries"]) {
      if (!delta[part]) continue;
      known[part].push(...delta[part]);
      if (known[part].length > MAX_ENTRIES) known[part].splice(0, known[part].length - MAX_ENTRIES);
    }
    for (const part of ["recovery", "snapshot_layout", "evaluations"]) if (part in delta) known[part] = delta[part];
    this.onChange(changed);
  }

  /** Loads one more page of older events; false if there are none. */
  async loadOlder() {
    const first = this.document.events[0]?.n;
    if (first === undefined || first <= this.document.oldest) return false;
    const answer = await fetch(`events?before=${first}`, { cache: "no-store" });
    if (!answer.ok) return false;
    const page = await answer.json();
    const known = this.document.events;
    if (!page.length || known[0]?.n !== first) return false;
    this.document.events = [...page, ...known].slice(-MAX_EVENTS);
    this.onChange(new Set(["events"]));
    return true;
  }
}
