// What the page knows: the document, kept current by deltas. One EventSource; after a gap, the document anew.

const MOST_EVENTS = 10_000;
const MOST_KEPT = 300;
const SILENCE_MS = 16_000;
const RETRY_MS = [500, 1000, 2000, 5000];

export class Store {
  /** @param onChange called with the set of parts that are other now; with "link" for the connection. */
  constructor(onChange) {
    this.document = null;
    this.link = "connecting";
    this.lostAt = null;
    this.skew = 0;
    this.onChange = onChange;
    this.source = null;
    this.heardAt = 0;
    this.newsAt = performance.now();
    this.failures = 0;
    this.loading = false;
    setInterval(() => this.watch(), 2000);
    document.addEventListener("visibilitychange", () => document.hidden || this.watch());
  }

  /** Seconds since 1970 on the coordinator's clock, as well as the way here allows. */
  now() {
    return Date.now() / 1000 + this.skew;
  }

  /** For so long the coordinator has heard nothing from the broker, or we nothing from the coordinator. */
  quiet() {
    return (performance.now() - this.newsAt) / 1000;
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
      this.news(fresh.quiet_s);
      fresh.events = this.joined(fresh);
      this.document = fresh;
      this.onChange(new Set(["all"]));
      this.listen(fresh.position);
      this.failures = 0;
    } catch (error) {
      console.info("ftd: no answer:", error.message);
      this.lose();
      setTimeout(() => this.load(), RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)]);
    } finally {
      this.loading = false;
    }
  }

  /** Older events that were loaded before stay, where nothing is missing in between. */
  joined(fresh) {
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
    this.heardAt = performance.now();
    source.onopen = () => this.hear();
    source.onmessage = (message) => {
      this.hear();
      this.apply(JSON.parse(message.data));
    };
    source.addEventListener("beat", (message) => {
      this.hear();
      this.news(JSON.parse(message.data).quiet_s);
    });
    source.addEventListener("reload", () => this.load());
    source.onerror = () => {
      this.lose();
      if (source.readyState === EventSource.CLOSED && this.source === source) {
        setTimeout(() => this.load(), RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)]);
      }
    };
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  hear() {
    this.heardAt = performance.now();
    if (this.link !== "live") {
      this.link = "live";
      this.lostAt = null;
      this.onChange(new Set(["link"]));
    }
  }

  news(quietS) {
    this.newsAt = performance.now() - 1000 * quietS;
  }

  lose() {
    if (this.link === "lost") return;
    this.link = "lost";
    this.lostAt = Date.now() / 1000;
    this.onChange(new Set(["link"]));
  }

  /** A connection may be dead without a word: there is a beat every two seconds. */
  watch() {
    if (this.source && performance.now() - this.heardAt > SILENCE_MS) {
      this.lose();
      this.load();
    }
  }

  apply({ quiet_s: quietS, ...delta }) {
    const known = this.document;
    this.news(quietS);
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
      if (known.events.length > MOST_EVENTS) known.events.splice(0, known.events.length - MOST_EVENTS);
    }
    if (delta.trend) {
      known.trend[1].length = Math.min(known.trend[1].length, delta.trend[0]);
      known.trend[1].push(...delta.trend[1]);
    }
    for (const part of ["marks", "recoveries"]) {
      if (!delta[part]) continue;
      known[part].push(...delta[part]);
      if (known[part].length > MOST_KEPT) known[part].splice(0, known[part].length - MOST_KEPT);
    }
    for (const part of ["recovery", "where", "evaluations"]) if (part in delta) known[part] = delta[part];
    this.onChange(changed);
  }

  /** One more page of older events; false: there are none. */
  async older() {
    const first = this.document.events[0]?.n;
    if (first === undefined || first <= this.document.oldest) return false;
    const answer = await fetch(`events?before=${first}`, { cache: "no-store" });
    if (!answer.ok) return false;
    const page = await answer.json();
    const known = this.document.events;
    if (!page.length || known[0]?.n !== first) return false;
    this.document.events = [...page, ...known].slice(-MOST_EVENTS);
    this.onChange(new Set(["events"]));
    return true;
  }
}
