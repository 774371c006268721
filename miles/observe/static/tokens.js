'use strict';
/* One sample: prompt by turns, response tokens coloured by a stored value, and the ledger. */

const COLOURINGS = {
  credit: { label: 'advantage × weight', kind: 'signed' },
  advantage: { label: 'advantage', kind: 'signed' },
  weight: { label: 'weight', kind: 'positive' },
  ratio: { label: 'ratio', kind: 'ratio' },
  gap: { label: 'trainer − engine log-prob', kind: 'gap' },
  mask: { label: 'mask', kind: 'mask' },
  rollout_log_probs: { label: 'engine log-prob', kind: 'surprise' },
  log_probs: { label: 'trainer log-prob', kind: 'surprise' },
  version: { label: 'weight version', kind: 'category' },
};

/* What begins a turn in the chat templates of common families; the group is the role. */
const TURN_BEGINS = [
  /<\|im_start\|>(\w+)\n/, // ChatML: Qwen, SmolLM, Nemotron
  /<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*/, // Llama 3
  /<start_of_turn>(\w+)\n/, // Gemma
  /<\|im_(?:system|user|assistant)\|>(\w+)<\|im_middle\|>/, // Kimi
  /<\|(system|user|assistant|observation)\|>\n?/, // GLM
  /<\uff5c(User|Assistant)\uff5c>/, // DeepSeek
  /\[(\/?INST)\]\s?/, // Mistral
];
const TURN_ENDS = /(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\uff5cend\u2581of\u2581sentence\uff5c>|<\/s>)\s*$/;
const ROLES = { model: 'assistant', observation: 'tool', User: 'user', Assistant: 'assistant', INST: 'user', '/INST': 'assistant' };

/* Cut a prompt at the markers of a chat template: [{role, text}]. */
function turns(prompt) {
  const begins = TURN_BEGINS.find(pattern => pattern.test(prompt)); // others are text that somebody wrote
  const marks = begins ? [...prompt.matchAll(new RegExp(begins.source, 'g'))] : [];
  if (!marks.length) return [{ role: 'prompt', text: prompt }];
  const found = marks[0].index > 0 ? [{ role: 'prompt', text: prompt.slice(0, marks[0].index) }] : [];
  marks.forEach((mark, i) => {
    const end = i + 1 < marks.length ? marks[i + 1].index : prompt.length;
    const text = prompt.slice(mark.index + mark[0].length, end).replace(TURN_ENDS, '');
    if (text || i + 1 < marks.length) found.push({ role: ROLES[mark[1]] || mark[1], text });
  });
  return found;
}

/* Cut a response where the model stops and a tool or the environment writes: [{role, begin, end}]. */
function segments(sample) {
  const { mask = [], version } = sample.columns;
  const outside = i => version ? version[i] === null : mask[i] === 0;
  const found = [];
  sample.tokens.forEach((token, i) => {
    const role = outside(i) ? 'tool or environment' : 'model';
    const current = found[found.length - 1];
    if (current && current.role === role) current.end = i + 1;
    else found.push({ role, begin: i, end: i + 1 });
  });
  return found;
}

/* The calls of tools in a turn, `name(argument: value)`: those between <tool_call> and </tool_call>. */
function toolCalls(text) {
  // Cut, not matched: for every call that is not closed, a pattern would read on to the end.
  const closed = text.split('</tool_call>').slice(0, -1).filter(part => part.includes('<tool_call>'));
  return closed.map(part => {
    const call = part.slice(part.indexOf('<tool_call>') + '<tool_call>'.length);
    try {
      const { name, arguments: given } = JSON.parse(call);
      const values = typeof given === 'string' ? JSON.parse(given) : given;
      return `${name}(${Object.entries(values ?? {}).map(([key, value]) => `${key}: ${JSON.stringify(value)}`).join(', ')})`;
    } catch {
      return 'a tool, but not as JSON';
    }
  });
}

/* Background of a token, as [custom property, strength from 0 to 1]; null: none. */
function tint(kind, value, largest) {
  if (value === null || value === undefined) return null;
  if (kind === 'mask') return value ? ['--good', 0.35] : ['--soft', 0.3];
  if (kind === 'category') return [COLOURS[value % COLOURS.length], 0.4];
  if (kind === 'surprise') return ['--mark', Math.min(1, -value / 5)];
  if (kind === 'ratio') return around(Math.log(Math.max(value, 1e-6)), Math.log(1.5));
  if (kind === 'gap') return around(value, 0.5);
  if (!value || !largest) return null;
  return [kind === 'signed' && value < 0 ? '--bad' : '--good', 0.15 + 0.85 * Math.abs(value) / largest];
}

/* A value that should be 0: as strong as its size, full at `most`; less than 5 % of that is no colour. */
function around(value, most) {
  const strength = Math.min(1, Math.abs(value) / most);
  return strength < 0.05 ? null : [value < 0 ? '--bad' : '--good', strength];
}

/* What the colours say, in words. */
const KEYS = {
  signed: 'green raises the token’s probability, red lowers it', positive: 'the stronger, the more the token weighs',
  ratio: 'green: more probable than when the iteration began, red: less; full colour at 1.5 and 0.67',
  gap: 'green: the trainer gives the token more than the engine, red: less; full colour at 0.5 nats',
  mask: 'green is in the loss', surprise: 'the stronger, the less probable', category: 'a colour for each version of the weights',
};

/* The parts of a reward that is a weighted sum, in words; null: it has none. */
function rewardParts(parts) {
  const named = Object.entries(parts || {});
  return named.length ? named.map(([name, value]) => `${name} ${shown(value)}`).join(' · ') : null;
}

function describeToken(sample, i) {
  const values = Object.keys(COLOURINGS).filter(name => sample.columns[name])
    .map(name => `${COLOURINGS[name].label} ${shown(sample.columns[name][i])}`);
  return [`token ${i}`, JSON.stringify(sample.tokens[i]), ...values].join(' · ');
}

function tokenBlocks(sample, colouring, status) {
  const column = sample.columns[colouring] || [], kind = (COLOURINGS[colouring] || {}).kind;
  const largest = column.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
  return segments(sample).map(({ role, begin, end }) => {
    const text = make('div', { class: 'tokens' });
    for (let i = begin; i < end; i++) {
      const token = make('span', { 'data-token': i, title: describeToken(sample, i) }, sample.tokens[i]);
      const tinted = tint(kind, column[i], largest);
      if (tinted) token.style.background = `color-mix(in srgb, var(${tinted[0]}) ${Math.round(tinted[1] * 60)}%, transparent)`;
      text.append(token);
    }
    text.onpointerover = event => {
      const at = event.target.dataset?.token;
      if (at !== undefined) status.textContent = describeToken(sample, Number(at));
    };
    const calls = role === 'model' ? toolCalls(sample.tokens.slice(begin, end).join('')) : [];
    return make('section', { class: `turn ${role === 'model' ? 'model' : 'outside'}` }, make('h4', {}, role), text,
      ...calls.map(call => make('p', { class: 'call' }, 'calls ', make('code', {}, call))));
  });
}

/* The dialog of one sample; `others` are its group's samples, for the arrow keys. */
class SampleDialog {
  constructor() {
    this.colouring = null;
    this.dialog = make('dialog', { class: 'sample', 'aria-label': 'sample' });
    this.dialog.onkeydown = event => this.key(event);
    this.dialog.onclick = event => { if (event.target === this.dialog) this.dialog.close(); };
    document.body.append(this.dialog);
  }

  open(step, index, others) {
    this.wanted = index;
    return this.load(step, index, others).catch(error => { this.wanted = this.index; showError(error); });
  }

  async load(step, index, others) {
    const asked = this.asked = (this.asked || 0) + 1;
    const sample = await page.source.sample(step, index);
    if (asked !== this.asked) return; // another one was asked for meanwhile
    Object.assign(this, { others, step, index, sample });
    this.render();
    if (!this.dialog.open) this.dialog.showModal();
    this.dialog.scrollTop = 0;
  }

  key(event) {
    if (event.key === ',' || event.key === '.') return this.moveToken(event.key === '.' ? 1 : -1);
    if (!['ArrowLeft', 'ArrowRight'].includes(event.key) || event.target.tagName === 'SELECT') return;
    const at = this.others.indexOf(this.wanted) + (event.key === 'ArrowLeft' ? -1 : 1);
    if (at >= 0 && at < this.others.length) this.open(this.step, this.others[at], this.others);
  }

  /* Mark the token `by` places further, and say its figures. */
  moveToken(by) {
    const count = this.sample.tokens.length;
    if (!count) return;
    this.token = this.token === null ? 0 : Math.min(count - 1, Math.max(0, this.token + by));
    this.dialog.querySelector('.tokens .at')?.classList.remove('at');
    const token = this.dialog.querySelector(`[data-token="${this.token}"]`);
    token.classList.add('at');
    token.scrollIntoView({ block: 'nearest' });
    this.dialog.querySelector('.status').textContent = describeToken(this.sample, this.token);
  }

  render() {
    const { sample } = this;
    this.token = null; // marked by the keys
    const can = Object.keys(COLOURINGS).filter(name => (sample.columns[name] || []).some(value => value !== null));
    if (!can.includes(this.colouring)) this.colouring = can[0] || null;
    const status = make('p', { class: 'status', 'aria-live': 'polite' }, can.length ? 'Point at a token, or press . and , to see its values.' : 'Tokens of this answer are not stored.');
    const response = make('div', { class: 'response' });
    const key = make('small', { class: 'key-words' });
    const draw = () => { key.textContent = this.colouring ? KEYS[COLOURINGS[this.colouring].kind] : ''; response.replaceChildren(...(sample.tokens.length ? tokenBlocks(sample, this.colouring, status)
      : [make('section', { class: 'turn model' }, make('h4', {}, 'model'), make('pre', {}, sample.response))])); };
    const select = make('select', { 'aria-label': 'colour tokens by', onchange: event => { this.colouring = event.target.value; draw(); } },
      ...can.map(name => make('option', { value: name, selected: name === this.colouring }, COLOURINGS[name].label)));
    draw();
    const place = this.others.indexOf(this.index);
    const facts = [
      `step ${sample.step}`, sample.train_step && sample.train_step !== sample.step ? `optimizer step ${sample.train_step}` : null,
      sample.group !== null ? `group ${sample.group}` : null, sample.trajectory !== null ? `trajectory ${sample.trajectory}` : null,
      `reward ${shown(sample.reward)}${sample.reward_parts ? ` (${rewardParts(sample.reward_parts)})` : ''}`,
      sample.advantage !== null ? `advantage ${shown(sample.advantage)}` : null, sample.status,
      sample.label !== null ? `reference ${sample.label}` : null,
    ].filter(Boolean);
    this.dialog.replaceChildren(...[
      make('header', {}, make('h2', {}, `Answer ${place + 1} of ${this.others.length}`),
        make('button', { onclick: () => this.key({ key: 'ArrowLeft', target: this.dialog }), disabled: place <= 0, title: 'arrow left' }, 'previous'),
        make('button', { onclick: () => this.key({ key: 'ArrowRight', target: this.dialog }), disabled: place + 1 >= this.others.length, title: 'arrow right' }, 'next'),
        make('button', { onclick: () => this.dialog.close(), title: 'Escape', class: 'close' }, 'close')),
      make('p', { class: 'facts' }, facts.join(' · ')),
      ...turns(sample.prompt).map(turn => make('section', { class: 'turn prompt' }, make('h4', {}, turn.role), make('pre', {}, turn.text))),
      can.length ? make('p', { class: 'colouring' }, make('label', {}, 'colour tokens by ', select), ' ', key) : null, response, status,
      sample.ledger.length ? this.ledger() : null,
    ].filter(Boolean));
  }

  ledger() {
    const rows = this.sample.ledger.map(line => make('tr', {}, make('td', {}, line.name), make('td', {}, line.value), make('td', {}, line.why)));
    return make('section', { class: 'ledger' }, make('h3', {}, 'Token ledger'), make('p', {}, 'How the weight of each token in the loss arises.'), make('table', {}, make('tbody', {}, ...rows)));
  }
}
