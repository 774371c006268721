'use strict';
/* The sample browser: an iteration's groups with their answers side by side, filters, and search. */

const GROUPS_AT_ONCE = 20;

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
  const rewards = group.samples.map(s => s.reward).filter(r => r !== null);
  return rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
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
    this.shownGroups = GROUPS_AT_ONCE;
    this.step = make('input', { type: 'number', id: 'sample-step', 'aria-label': 'iteration, by its last step', onchange: () => this.go(Number(this.step.value)) });
    this.slider = make('input', { type: 'range', 'aria-label': 'iteration', onchange: () => this.go(Number(this.slider.value)) });
    this.before = make('button', { onclick: () => this.go(this.current.previous), title: 'p' }, 'previous');
    this.after = make('button', { onclick: () => this.go(this.current.next), title: 'n' }, 'next');
    this.newest = make('button', { onclick: () => this.go(null) }, 'newest');
    this.filter = this.choice('groups shown', FILTERS);
    this.order = this.choice('order of groups', ORDERS);
    this.field = make('input', { type: 'search', id: 'search', placeholder: 'search all answers  ( / )', 'aria-label': 'search prompts, answers and references' });
    this.status = make('p', { class: 'status', 'aria-live': 'polite' });
    this.list = make('div', { class: 'groups' });
    this.hits = make('div', { class: 'hits' });
    const form = make('form', { role: 'search', onsubmit: event => { event.preventDefault(); this.search().catch(showError); } }, this.field, make('button', {}, 'search'));
    section.append(
      make('div', { class: 'controls' }, make('label', {}, 'step ', this.step), this.slider, this.before, this.after, this.newest, this.filter, this.order),
      form, this.hits, this.status, this.list);
  }

  choice(label, options) {
    const redraw = () => { this.shownGroups = GROUPS_AT_ONCE; this.draw(); };
    return make('select', { 'aria-label': label, onchange: redraw }, ...Object.entries(options).map(([value, option]) => make('option', { value }, option.label)));
  }

  /* Show the iteration `step`, or the newest (null). */
  go(step) { return this.load(step).catch(showError); }

  async load(step) {
    if (step === undefined) return;
    const asked = this.asked = (this.asked || 0) + 1;
    const found = await page.source.samples(step);
    if (asked !== this.asked) return;
    this.follow = step === null || !found.groups;
    if (found.step !== this.current?.step) this.shownGroups = GROUPS_AT_ONCE;
    this.current = found.groups ? found : null;
    this.draw();
  }

  async refresh() {
    if (this.follow) return this.load(null);
    const newest = await page.source.samples(this.current.step);
    Object.assign(this.current, { last: newest.last, next: newest.next });
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
    const answers = kept.reduce((sum, group) => sum + group.samples.length, 0);
    this.status.textContent = `Step ${this.current.step}: ${kept.length} of ${this.current.groups.length} groups, ${answers} answers.`;
    const drawn = kept.slice(0, this.shownGroups).map(group => this.group(group));
    if (kept.length > this.shownGroups) {
      drawn.push(make('button', { onclick: () => { this.shownGroups *= 4; this.draw(); } }, `show more of ${kept.length} groups`));
    }
    this.list.replaceChildren(...drawn);
  }

  group(group) {
    const others = group.samples.map(sample => sample.index);
    const name = group.group === null ? 'prompt' : `group ${group.group}`;
    const last = turns(group.prompt).findLast(turn => turn.text.trim());
    return make('section', { class: 'group' },
      make('h3', {}, name, make('small', {}, ` mean reward ${shown(meanReward(group))}${group.label === null ? '' : ` · reference ${group.label}`}`)),
      make('pre', { class: 'prompt', title: group.prompt }, last ? last.text : group.prompt),
      make('div', { class: 'answers' }, ...group.samples.map(sample => this.card(this.current.step, sample, others, partOfTrajectory(group, sample)))));
  }

  card(step, sample, others, part = null) {
    const good = sample.reward > 0 ? 'good' : 'bad';
    const facts = [part, sample.status, sample.length ? `${sample.length} tokens` : null, sample.advantage !== null ? `advantage ${shown(sample.advantage)}` : null, sample.recorded ? 'ratio and gap' : null];
    return make('button', { class: 'answer', onclick: () => this.dialog.open(step, sample.index, others) },
      make('span', { class: `reward ${good}` }, shown(sample.reward)), make('span', { class: 'text' }, sample.response + (sample.cut ? ' …' : '')),
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
