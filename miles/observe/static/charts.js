'use strict';
/* Curves and stacked bars by uPlot: smoothing, hover over all charts at once, zoom by dragging. */

const COLOURS = ['--c0', '--c1', '--c2', '--c3', '--c4', '--c5', '--c6', '--c7', '--c8', '--c9'];
const SMOOTHED_FROM = 40; // measurements: fewer are drawn unchanged

const view = { from: null, to: null, smoothing: 0.6, charts: [] };

/* The colour that a custom property has now, light or dark. */
function colour(name) {
  const probe = make('span', { class: 'probe' });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/* The label of a tick, with digits enough to tell it from the next one. */
function tickLabel(tick, step) {
  const digits = Math.min(15, Math.max(4, Math.ceil(Math.log10(Math.abs(tick) / step)) + 2));
  const value = Number(tick.toPrecision(digits));
  return Math.abs(value) >= 10000 ? value.toLocaleString('en', { maximumFractionDigits: 6 }) : String(value);
}

/* A colour that lets others behind it be seen. */
function transparent(rgb) {
  return rgb.replace(/^rgb\((.*)\)$/, 'rgba($1, 0.18)');
}

/* Exponential moving average without the bias of its start; gaps stay gaps. */
function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = mean * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

class Chart {
  constructor(figure, title, unit) {
    this.unit = unit;
    this.height = figure.closest('.main') ? (isNarrow() ? 190 : 270) : (isNarrow() ? 150 : 180);
    this.caption = make('b');
    this.readout = make('div', { class: 'readout' });
    this.area = make('div', { class: 'plot', tabindex: '0', role: 'img', 'aria-label': `${title} against step; arrow keys move the cursor` });
    figure.append(make('figcaption', {}, make('span', {}, title, this.caption), make('small', { title: unit }, unit.split(', ').slice(1).join(', '))), this.area, this.readout);
    this.figure = figure;
    figure.dataset.title = title;
    this.title = title;
    this.visible = false;
    this.stale = true;
    this.plot = null;
    this.observers = [new IntersectionObserver(seen => {
      this.visible = seen[seen.length - 1].isIntersecting;
      if (this.visible && this.stale) this.draw().catch(showError);
    }, { rootMargin: '200px' }), new ResizeObserver(() => this.resize())];
    this.observers[0].observe(figure);
    this.observers[1].observe(this.area);
    this.area.onkeydown = event => this.move(event);
    view.charts.push(this);
  }

  /* Draw again, now if it can be seen, else when it can. */
  refresh() {
    this.stale = true;
    if (this.visible) this.draw().catch(showError);
  }

  /* Free what would outlive the figure: uPlot keeps every plot that shares its cursor. */
  close() {
    this.asked = Infinity; // an answer on its way is dropped
    this.observers.forEach(observer => observer.disconnect());
    this.plot?.destroy();
  }

  async draw() {
    this.stale = false;
    const asked = this.asked = (this.asked || 0) + 1;
    const drawn = await this.load();
    if (asked !== this.asked) return;
    if (!drawn) {
      this.plot?.destroy();
      this.plot = this.shape = null;
      this.figure.dataset.points = 0;
      this.caption.textContent = '';
      this.readout.replaceChildren('\u00a0');
      return;
    }
    const { data, series, bands = [] } = drawn;
    const shape = series.map(s => s.label + s.stroke).join('|');
    if (this.plot && this.shape === shape) {
      this.plot.setData(data);
    } else {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.options(series, bands), data, this.area);
    }
    this.figure.dataset.points = data[0].length;
    this.idle();
  }

  options(series, bands) {
    const axis = { stroke: () => colour('--soft'), grid: { stroke: () => colour('--edge'), width: 1 }, ticks: { show: false }, font: '11px system-ui', labelFont: '11px system-ui', labelSize: 14, labelGap: 0, size: 22 };
    const wide = (plot, ticks) => 14 + 6.3 * Math.max(1, ...(ticks ?? []).map(tick => (tick ?? '').length));
    const values = (plot, ticks, axis, space, step) => ticks.map(tick => tick === null ? '' : tickLabel(tick, step));
    return {
      width: Math.max(this.area.clientWidth, 120), height: this.height, legend: { show: false },
      cursor: { sync: { key: 'run' }, drag: { x: true, y: false, setScale: false }, points: { size: 5 } },
      scales: { x: { time: false }, y: { range: (plot, low, high) => this.range(low, high) } },
      axes: [{ ...axis, label: 'step', values, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] }, { ...axis, label: this.axis, size: wide, values }],
      series: [{}, ...series],
      bands,
      hooks: {
        setCursor: [plot => plot.cursor.idx === null || plot.cursor.idx === undefined ? this.idle() : this.show(plot.cursor.idx)],
        setSelect: [plot => this.select(plot)],
      },
    };
  }

  range(low, high) {
    if (low === null || low === undefined) return [0, 1];
    if (this.share && low >= 0 && high <= 1) return [0, [0.01, 0.1, 1].find(top => high <= top)];
    if (this.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
    if (high - low < this.least) [low, high] = [Math.min(low, 0) - this.least / 2, Math.max(high, 0) + this.least / 2];
    const margin = (high - low || Math.abs(high) || 1) * 0.06;
    return [this.zero && low === 0 ? 0 : low - margin, this.zero && high === 0 ? 0 : high + margin];
  }

  select(plot) {
    if (plot.select.width < 4) return;
    const from = plot.posToVal(plot.select.left, 'x'), to = plot.posToVal(plot.select.left + plot.select.width, 'x');
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    zoom(from, to);
  }

  move(event) {
    if (!this.plot || !['ArrowLeft', 'ArrowRight'].includes(event.key)) return;
    event.preventDefault();
    const steps = this.plot.data[0];
    const at = this.plot.cursor.idx ?? (event.key === 'ArrowLeft' ? steps.length : -1);
    const next = Math.min(steps.length - 1, Math.max(0, at + (event.key === 'ArrowLeft' ? -1 : 1)));
    this.plot.setCursor({ left: this.plot.valToPos(steps[next], 'x'), top: this.height / 3 });
  }

  resize() {
    if (this.plot && this.area.clientWidth) this.plot.setSize({ width: this.area.clientWidth, height: this.height });
  }
}

class Curves extends Chart {
  constructor(figure, spec) {
    super(figure, spec.title, spec.unit);
    this.axis = spec.unit.split(',')[0];
    this.zero = spec.zero;
    this.share = spec.range !== null;
    this.least = spec.least;
    this.keys = spec.series;
  }

  async load() {
    const answer = await page.source.metrics(this.keys.flatMap(s => s.low ? [s.key, s.low, s.high] : [s.key]), view.from, view.to, 1500);
    this.values = this.keys.map(s => answer.values[s.key]);
    this.steps = answer.steps;
    this.exact = answer.exact;
    this.newest = this.keys.map((s, i) => this.last(i) === null ? null : answer.last?.[s.key] ?? this.values[i][this.last(i)]);
    const measured = Math.max(...this.values.map(column => column.filter(v => v !== null).length));
    const series = [], data = [answer.steps], bands = [];
    this.keys.forEach((key, i) => {
      const smoothing = this.values[i].filter(v => v !== null).length >= SMOOTHED_FROM ? view.smoothing : 0;
      const smoothed = values => smoothing > 0 ? smooth(values, smoothing) : values;
      const stroke = COLOURS[i % COLOURS.length], faint = smoothing > 0 && !key.low;
      const base = { label: key.label, spanGaps: true, points: { show: measured < SMOOTHED_FROM, size: 4 } };
      series.push({ ...base, stroke: () => colour(stroke), alpha: faint ? 0.3 : 1, width: faint ? 1 : 1.6 });
      data.push(key.low ? smoothed(this.values[i]) : this.values[i]);
      if (key.low) { // a mean of several runs, with the bounds of its interval
        const edge = { label: key.label, spanGaps: true, width: 0, points: { show: false }, stroke: () => 'transparent' };
        series.push(edge, edge);
        data.push(smoothed(answer.values[key.high]), smoothed(answer.values[key.low]));
        bands.push({ series: [data.length - 2, data.length - 1], fill: () => transparent(colour(stroke)) });
      }
      if (faint) {
        series.push({ ...base, stroke: () => colour(stroke), width: 1.8, points: { show: false } });
        data.push(smooth(this.values[i], smoothing));
      }
    });
    return { data, series, bands };
  }

  last(i) {
    const found = (this.values[i] || []).findLastIndex(value => value !== null);
    return found < 0 ? null : found;
  }

  idle() {
    const single = this.keys.length === 1;
    this.caption.textContent = single && this.newest[0] !== null ? shown(this.newest[0]) : '';
    this.readout.replaceChildren(...(single ? ['\u00a0'] : this.keys.map((key, i) => this.entry(key, i, this.newest[i]))));
  }

  show(index) {
    const values = this.keys.map((key, i) => this.entry(this.keys.length > 1 ? key : null, i, this.values[i][index]));
    this.readout.replaceChildren(make('span', {}, `${this.exact ? 'step' : 'near step'} ${this.steps[index]}`), ...values);
  }

  entry(key, i, value) {
    return make('span', {}, make('i', { class: `key k${i % COLOURS.length}` }), `${key ? key.label + ' ' : ''}${shown(value)}`);
  }
}

class Bars extends Chart {
  constructor(figure, title, note) {
    super(figure, title, note);
    this.axis = 'seconds';
    this.zero = true;
  }

  async load() {
    const answer = await page.source.phases(view.from, view.to, 200);
    this.answer = answer;
    this.names = Object.keys(answer.phases);
    if (!answer.steps.length) return null;
    const sums = answer.steps.map(() => 0), layers = [];
    for (const name of this.names) {
      answer.phases[name].forEach((seconds, i) => { sums[i] += seconds; });
      layers.push([...sums]);
    }
    const bars = uPlot.paths.bars({ size: [0.92, 60] });
    const series = this.names.map((name, i) => ({
      label: name, paths: bars, points: { show: false }, width: 0,
      fill: () => colour(COLOURS[i % COLOURS.length]), stroke: () => colour(COLOURS[i % COLOURS.length]),
    }));
    return { data: [answer.steps, ...layers.reverse()], series: series.reverse() };
  }

  idle() {
    this.caption.textContent = '';
    if (this.answer?.steps.length) this.show(this.answer.steps.length - 1);
  }

  show(index) {
    const total = this.names.reduce((sum, name) => sum + this.answer.phases[name][index], 0);
    const entries = this.names.map((name, i) => make('span', {}, make('i', { class: `key k${i % COLOURS.length}` }), `${name} ${shown(this.answer.phases[name][index])} s`));
    const what = this.answer.per_bar > 1 ? `mean of ${this.answer.per_bar} iterations up to step` : 'step';
    this.readout.replaceChildren(make('span', {}, `${what} ${this.answer.steps[index]}: ${shown(total)} s`), ...entries);
  }
}

function refreshCharts() { view.charts.forEach(chart => chart.refresh()); }

function zoom(from, to) {
  view.from = from === null ? null : Math.floor(from);
  view.to = to === null ? null : Math.ceil(to);
  const fields = [['zoom-from', view.from], ['zoom-to', view.to]];
  for (const [id, value] of fields) { const field = document.getElementById(id); if (field) field.value = value ?? ''; }
  refreshCharts();
}
