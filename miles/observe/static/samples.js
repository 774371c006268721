'use strict';
/* The sample browser: one group of an iteration with its distinct answers side by side, filters, and search. */

const ANSWERS_AT_ONCE = 6;

const FILTERS = {
  all: { label: 'all groups', keep: () => true },
  mixed: { label: 'mixed rewards', keep: group => new Set(group.samples.map(s => s.reward)).size > 1 },
  equal: { label: 'equal rewards', keep: group => new Set(group.samples.map(s => s.reward)).size === 1 },
  truncated: { label: 'with truncated answers', keep: group => group.samples.some(s => s.status === 'truncated') },
  recorded: { label: 'with the trainer’s values of tokens', keep: group => group.samples.some(s => s.recorded) },
  aborted: { label: 'with aborted answers', keep: group => group.samples.some(s => s.status === 'aborted') },
};

const ORDERS = {
  order: { label: 'in order', by: null },
  lowest: { label: 'lowest reward first', by: group => meanReward(group) },
  highest: { label: 'highest reward first', by: group => meanReward(group) === null ? null : -meanReward(group) },
  longest: { label: 'longest first', by: group => -Math.max(...group.samples.map(s => s.length ?? s.response.length)) },
};

/* The mean of those of a group's rewards that are there; null if none is. */
function meanReward(group) {
  if (group.mean !== undefined) return group.mean;
  const rewards = group.samples.map(s => s.reward).filter(r => r !== null);
  return rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
}

/* The distinct answers of a group with how often each was given: the best, the worst, then the others from the best. */
function distinct(group) {
  const found = new Map();
  for (const sample of group.samples) {
    const key = JSON.stringify([sample.response, sample.cut && sample.index, sample.reward, sample.status, partOfTrajectory(group, sample)]);
    const known = found.get(key);
    if (known) { known.count += sample.count ?? 1; if (sample.recorded && !known.sample.recorded) known.sample = sample; }
    else found.set(key, { sample, count: sample.count ?? 1 });
  }
  const value = each => each.sample.reward ?? -Infinity;
  const sorted = [...found.values()].sort((a, b) => value(b) - value(a) || 0);
  return sorted.length > 2 ? [sorted[0], sorted[sorted.length - 1], ...sorted.slice(1, -1)] : sorted;
}

const MOST_WORDS = 500;
const LEAST_COMMON = 0.3; // of the words: answers that share fewer are simply different

/* The parts of `text`, each with whether it differs from `other`: what is outside their longest common subsequence. */
function differences(text, other) {
  const [own, its] = [text, other].map(each => each.match(/\s*(?:[\p{L}\p{N}]+|[^\s\p{L}\p{N}])/gu) ?? []);
  const equal = (i, j) => own[i].trim() === its[j].trim();
  if (own.length > MOST_WORDS || its.length > MOST_WORDS) return [[text, false]];
  const width = its.length + 1;
  const common = new Uint16Array((own.length + 1) * width);
  for (let i = own.length - 1; i >= 0; i--) {
    for (let j = its.length - 1; j >= 0; j--) {
      common[i * width + j] = equal(i, j) ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  if (common[0] < LEAST_COMMON * Math.max(own.length, its.length)) return [[text, false]];
  const parts = [];
  for (let i = 0, j = 0; i < own.length;) {
    if (j < its.length && equal(i, j)) { parts.push([own[i++], false]); j++; }
    else if (j < its.length && common[i * width + j + 1] >= common[(i + 1) * width + j]) j++;
    else parts.push([own[i++], true]);
  }
  return parts;
}

/* Which part of its trajectory a sample is, in words; null if it is the whole one. */
function partOfTrajectory(group, sample) {
  const parts = sample.trajectory === null ? [] : group.samples.filter(other => other.trajectory === sample.trajectory);
  return parts.length > 1 ? `trajectory ${sample.trajectory}, part ${parts.indexOf(sample) + 1} of ${parts.length}` : null;
}

class SampleBrowser {
  constructor(section) {
    this.dialog = new SampleDialog();
    this.current = null;
    this.follow = true; // stay on the newest iteration
    this.at = 0; // the group that is shown, among those that the filter leaves
    this.shows = ANSWERS_AT_ONCE;
    this.step = make('input', { type: 'number', id: 'sample-step', 'aria-label': 'iteration, by its last step', onchange: () => this.go(Number(this.step.value)) });
    this.slider = make('input', { type: 'range', 'aria-label': 'iteration', onchange: () => this.go(Number(this.slider.value)) });
    this.before = make('button', { onclick: () => this.go(this.current.previous), title: 'p' }, 'previous step');
    this.after = make('button', { onclick: () => this.go(this.current.next), title: 'n' }, 'next step');
    this.newest = make('button', { onclick: () => this.go(null) }, 'newest');
    this.filter = this.choice('groups shown', FILTERS);
    this.order = this.choice('order of groups', ORDERS);
    this.field = make('input', { type: 'search', id: 'search', placeholder: 'search all answers  ( / )', 'aria-label': 'search prompts, answers and references' });
    this.back = make('button', { onclick: () => this.turn(-1), title: 'k' }, 'previous group');
    this.forth = make('button', { onclick: () => this.turn(1), title: 'j' }, 'next group');
    this.status = make('span', { class: 'status', 'aria-live': 'polite' });
    this.list = make('div', { class: 'groups' });
    this.hits = make('div', { class: 'hits' });
    const form = make('form', { role: 'search', onsubmit: event => { event.preventDefault(); this.search().catch(showError); } }, this.field, make('button', {}, 'search'));
    section.append(
      make('div', { class: 'controls' }, make('label', {}, 'step ', this.step), this.slider, this.before, this.after, this.newest, this.filter, this.order),
      form, this.hits, make('div', { class: 'controls' }, this.back, this.forth, this.status), this.list);
  }

  choice(label, options) {
    const redraw = () => { this.at = 0; this.draw(); };
    return make('select', { 'aria-label': label, onchange: redraw }, ...Object.entries(options).map(([value, option]) => make('option', { value }, option.label)));
  }

  /* Show the iteration `step`, or the newest (null). */
  go(step) { return this.load(step).catch(showError); }

  async load(step) {
    if (step === undefined) return;
    this.follow = step === null; // at once: a refresh meanwhile would ask for the newest
    const asked = this.asked = (this.asked || 0) + 1;
    const found = await page.source.samples(step);
    if (asked !== this.asked) return;
    this.follow ||= !found.groups;
    if (found.step !== this.current?.step) this.at = 0;
    this.current = found.groups ? found : null;
    this.draw();
  }

  async refresh() {
    if (this.follow || !this.current) return this.load(null);
    const current = this.current; // a click meanwhile may load another step
    const newest = await page.source.samples(current.step);
    Object.assign(current, { last: newest.last, next: newest.next });
    this.drawControls();
  }

  drawControls() {
    const { step, first, last, previous, next } = this.current;
    Object.assign(this.slider, { min: first, max: last, value: step });
    this.step.value = step;
    this.before.disabled = previous === null;
    this.after.disabled = next === null;
  }

  draw() {
    if (!this.current) {
      this.status.textContent = 'No answers are stored yet.';
      this.list.replaceChildren();
      return;
    }
    this.drawControls();
    const by = ORDERS[this.order.value].by;
    const kept = this.current.groups.filter(FILTERS[this.filter.value].keep);
    if (by) kept.sort((a, b) => (by(a) ?? Infinity) - (by(b) ?? Infinity) || 0); // those without a reward last
    this.at = Math.max(0, Math.min(this.at, kept.length - 1));
    this.count = kept.length;
    this.back.disabled = this.at === 0;
    this.forth.disabled = this.at + 1 >= kept.length;
    const which = kept.length ? `group ${this.at + 1} of ${kept.length}` : 'no group';
    this.status.textContent = `Step ${this.current.step}: ${which}${kept.length < this.current.groups.length ? ` of ${this.current.groups.length} that are stored` : ''}.`;
    this.list.replaceChildren(...(kept.length ? [this.group(kept[this.at])] : []));
  }

  /* Show the next (1) or the previous (-1) group. */
  turn(by) {
    if (!this.current || this.at + by < 0 || this.at + by >= this.count) return;
    this.at += by;
    this.shows = ANSWERS_AT_ONCE;
    this.draw();
  }

  group(group) {
    const answers = distinct(group), others = answers.map(each => each.sample.index);
    const total = group.size ?? group.samples.length;
    const name = group.group === null ? 'prompt' : `group ${group.group}`;
    const last = turns(group.prompt).findLast(turn => turn.text.trim());
    const counted = answers.length < total ? `${answers.length} different of ${total} answers` : `${total} answers`;
    const cards = answers.map(({ sample, count }, place) => {
      const parts = place && sample.response !== answers[0].sample.response ? differences(sample.response, answers[0].sample.response) : null;
      return this.card(this.current.step, sample, others, partOfTrajectory(group, sample), count, parts);
    });
    const more = cards.length > this.shows ? make('button', { onclick: () => { this.shows = Infinity; this.draw(); } }, `show ${cards.length - this.shows} more answers`) : null;
    return make('section', { class: 'group' },
      make('h3', {}, name, make('small', {}, ` mean reward ${shown(meanReward(group))} · ${counted}${group.label === null ? '' : ` · reference ${group.label}`}`)),
      ...(group.images ?? []).map((src, place) => make('img', { class: 'thumbnail', src, alt: `image ${place + 1} of the prompt` })),
      make('pre', { class: 'prompt', title: group.prompt }, last ? last.text : group.prompt),
      make('div', { class: 'answers' }, ...cards.slice(0, this.shows)), more,
      answers.length > 1 ? make('p', { class: 'status' }, 'The best answer is first, then the worst. Marked: what differs from the first.') : null);
  }

  card(step, sample, others, part = null, count = 1, parts = null) {
    const good = sample.reward > 0 ? 'good' : 'bad';
    const facts = [part, sample.status, sample.length ? `${sample.length} tokens` : null, sample.advantage !== null ? `advantage ${shown(sample.advantage)}` : null, sample.recorded ? 'ratio and gap' : null];
    const text = (parts ?? [[sample.response, false]]).map(([words, differs]) => differs ? make('mark', {}, words) : words);
    return make('button', { class: 'answer', onclick: () => this.dialog.open(step, sample.index, others) },
      make('span', {}, make('span', { class: `reward ${good}` }, shown(sample.reward)), count > 1 ? make('span', { class: 'count' }, ` ×${count}`) : null),
      make('span', { class: 'text' }, ...text, sample.cut ? ' …' : ''),
      sample.reward_parts ? make('small', { class: 'parts' }, rewardParts(sample.reward_parts)) : null,
      make('small', {}, facts.filter(Boolean).join(' · ')));
  }

  async search(cursor = 0, found = []) {
    const text = this.field.value.trim();
    const asked = this.searching = text + Math.random();
    if (!text) return this.hits.replaceChildren();
    const page_ = await page.source.search(text, cursor);
    if (asked !== this.searching) return undefined;
    const hits = [...found, ...page_.hits];
    const done = page_.cursor === null;
    const more = () => this.search(page_.cursor, hits).catch(showError);
    const summary = make('p', { class: 'status' }, `${hits.length} answers with “${text}”${done ? '' : `, ${Math.round(page_.searched * 100)} % searched`} `,
      done ? null : make('button', { onclick: more }, 'search on'), make('button', { onclick: () => { this.field.value = ''; this.hits.replaceChildren(); } }, 'clear'));
    this.hits.replaceChildren(summary, make('div', { class: 'answers' }, ...hits.map(hit => {
      const card = this.card(hit.step, hit, [hit.index]);
      card.prepend(make('small', {}, `step ${hit.step}`));
      return card;
    })));
    return !done && page_.hits.length === 0 ? more() : undefined;
  }
}
