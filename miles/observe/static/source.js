'use strict';
/* Where the page gets its data: a server, asked piece by piece, or the JSON inside this very file. */

class LiveSource {
  constructor() { this.live = true; }

  async ask(path, query = {}) {
    const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
    const response = await fetch(`api/${path}?${new URLSearchParams(given)}`);
    const answer = await response.json();
    if (answer.error) throw new Error(answer.error);
    return answer;
  }

  overview(since) { return this.ask('overview', { since }); }
  metrics(names, from, to, points) { return this.ask('metrics', { names: names.join('\n'), from, to, points }); }
  phases(from, to, bars) { return this.ask('phases', { from, to, bars }); }
  samples(step) { return this.ask('samples', { step }); }
  sample(step, index) { return this.ask('sample', { step, index }); }
  search(text, cursor) { return this.ask('search', { text, cursor }); }
}

class FileSource {
  constructor(data) {
    this.live = false;
    this.data = data;
    this.steps = Object.keys(data.iterations || {}).map(Number).sort((a, b) => a - b);
  }

  async overview() { return this.data.overview; }

  async metrics(names, from, to) {
    const { steps, values, exact, last } = this.data.metrics;
    const inside = steps.map((step, i) => i).filter(i => (from === null || steps[i] >= from) && (to === null || steps[i] <= to));
    const cut = Object.fromEntries(names.map(name => [name, inside.map(i => (values[name] || [])[i] ?? null)]));
    const hasEnd = to === null || to >= steps[steps.length - 1];
    return { steps: inside.map(i => steps[i]), values: cut, exact, last: hasEnd ? last : undefined };
  }

  async phases(from, to) {
    const { steps, phases, per_bar } = this.data.phases;
    // A bar has the steps after the bar before it, up to its own.
    const inside = steps.map((step, i) => i).filter(i => (from === null || steps[i] >= from) && (to === null || i === 0 || steps[i - 1] < to));
    const cut = Object.fromEntries(Object.entries(phases).map(([name, values]) => [name, inside.map(i => values[i])]));
    return { steps: inside.map(i => steps[i]), phases: cut, per_bar };
  }

  async samples(step) {
    if (!this.steps.length) return {};
    const last = this.steps.length - 1;
    const found = step === null ? last : this.steps.findIndex(stored => stored >= step);
    const at = found < 0 ? last : found;
    return {
      ...this.data.iterations[this.steps[at]],
      first: this.steps[0], last: this.steps[last],
      previous: at > 0 ? this.steps[at - 1] : null, next: at < last ? this.steps[at + 1] : null,
    };
  }

  async sample(step, index) { return this.data.details[`${step}/${index}`]; }

  async search(text) {
    const wanted = text.toLowerCase();
    const holds = sample => ['prompt', 'response', 'label'].some(key => String(sample[key] ?? '').toLowerCase().includes(wanted));
    const hits = Object.values(this.data.details).filter(holds);
    return { hits: hits.map(hit => ({ ...hit, length: hit.tokens.length || null })), cursor: null, searched: 1 };
  }
}

function openSource() {
  const inside = document.getElementById('data');
  return inside ? new FileSource(JSON.parse(inside.textContent)) : new LiveSource();
}

/* Make an element: make('div', {class: 'x', onclick: f}, 'text', child). Text is always text, never markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element[name] = value;
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

function shown(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  return size >= 10000 ? Math.round(value).toLocaleString('en') : String(Number(value.toPrecision(4)));
}
