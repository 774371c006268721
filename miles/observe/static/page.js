'use strict';
/* The page: is it learning, then health, curves by question, samples, settings; updates while the run goes on; keys. */

const POLL_MS = 2000;
const AT_FIRST = 4; // charts of a question

const page = { source: openSource(), overview: null, samples: null, chartKeys: null };

const isNarrow = () => matchMedia('(max-width: 700px)').matches;

function section(id, title, ...children) {
  return make('section', { id, 'aria-labelledby': `${id}-title` }, make('h2', { id: `${id}-title` }, title), ...children);
}

function build(overview) {
  const main = document.querySelector('main');
  const smoothing = make('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: view.smoothing, id: 'smoothing', oninput: event => { view.smoothing = Number(event.target.value); refreshCharts(); } });
  const bound = id => make('input', { type: 'number', id, placeholder: id === 'zoom-from' ? 'first' : 'last', 'aria-label': id === 'zoom-from' ? 'first step shown' : 'last step shown', onchange: applyZoom });
  const controls = make('div', { class: 'controls' },
    make('input', { type: 'search', id: 'chart-filter', placeholder: 'find a curve', 'aria-label': 'show curves whose name contains', oninput: filterCharts }),
    make('label', {}, 'smoothing ', smoothing), make('label', {}, 'steps ', bound('zoom-from'), ' to ', bound('zoom-to')),
    make('button', { id: 'zoom-all', onclick: () => zoom(null, null) }, 'all steps'), make('small', {}, 'drag over a chart to zoom'));
  const groups = Object.entries(overview.questions).filter(([id]) => id !== 'time' || !overview.tables).map(([id, question]) => {
    const more = make('button', { class: 'more', onclick: () => { group.dataset.all = 'true'; filterCharts(); } });
    const group = make('details', { class: 'group-of-charts', id, open: id === 'learning' || !isNarrow() }, make('summary', {}, question),
      make('div', { class: id === 'time' ? 'charts wide' : 'charts', id: `charts-${id}` }), make('p', { class: 'zeros' }), more);
    return group;
  });
  main.append(
    make('header', {}, make('h1', {}), make('span', { class: 'state' }), make('span', { id: 'live', role: 'status' }),
      make('progress', { 'aria-label': 'steps done' }), make('button', { id: 'theme', onclick: toggleTheme, title: 't' }, 'light / dark')),
    make('section', { id: 'first' }, make('p', { class: 'answer' }), make('p', { class: 'why' }), make('div', { class: 'tiles' }),
      make('div', { class: 'charts main', id: 'charts-main' })));
  if (!overview.tables) {
    main.append(make('section', { id: 'health', 'aria-label': 'health' }, make('p', { class: 'lights' }), make('div', { class: 'verdicts' })));
  }
  main.append(make('details', { class: 'objective' }, make('summary', {}), make('div', { class: 'formula' })));
  if (overview.tables) main.append(section('tables', 'Differences'));
  main.append(section('curves', 'Curves', controls, ...groups));
  if (overview.tables) return;
  const samples = section('samples', 'Answers');
  main.append(samples, section('settings', 'Settings', make('div', { class: 'changed' }), make('details', { class: 'all' }, make('summary', {}, 'all settings'), make('div', { class: 'sections' }))));
  new Bars(document.getElementById('charts-time').appendChild(make('figure')), 'Seconds by phase', 'of every iteration');
  page.samples = new SampleBrowser(samples);
}

function render(overview) {
  if (!page.overview) build(overview);
  const before = page.overview;
  page.overview = overview;
  document.title = overview.title;
  const text = (selector, words) => { const place = document.querySelector(selector); place.textContent = words ?? ''; place.hidden = !words; return place; };
  text('h1', overview.folder ? `${overview.title}: ${overview.folder}` : overview.title);
  text('main > header .state', overview.state).className = `state ${overview.state ?? ''}`;
  text('.why', overview.why && `It ${overview.state}: ${overview.why}.`.replace(/\.\.$/, '.'));
  const { is_learning: learns, sentence } = overview.answer;
  text('.answer', sentence).className = `answer ${learns === null ? '' : learns ? 'good' : 'bad'}`;
  const [done, total] = [overview.steps?.[1] ?? 0, overview.total_steps];
  const bar = document.querySelector('progress');
  bar.hidden = !total;
  Object.assign(bar, { max: total || 1, value: done });
  document.querySelector('.tiles').replaceChildren(...overview.tiles.map(tile => make('div', { class: 'tile' }, make('span', {}, tile.label), make('b', {}, tile.value), make('small', {}, tile.remark))));
  document.querySelector('.objective').hidden = !overview.words;
  if (!before) renderObjective(overview);
  renderCharts(overview.charts);
  if (overview.tables) return renderTables(overview.tables);
  renderVerdicts(overview.verdicts);
  if (!before) renderSettings(overview.settings);
  page.samples.refresh().catch(showError);
  return undefined;
}

function renderObjective({ words, formula }) {
  document.querySelector('.objective summary').textContent = words ?? '';
  document.querySelector('.formula').replaceChildren(...(formula ?? '').split('\n').filter(line => line.trim()).map(typeset));
}

function renderVerdicts(verdicts) {
  const words = { ok: 'healthy', 'may fire': 'may fire soon', unhealthy: 'unhealthy', 'no data': 'not enough measurements' };
  const name = state => state.replace(' ', '-');
  document.getElementById('health').hidden = !verdicts.length;
  document.querySelector('.lights').replaceChildren(...verdicts.map(v => make('span', { class: `light ${name(v.state)}`, title: `${words[v.state]}: ${v.figure}. It fires: ${v.threshold}.` }, v.rule, make('span', { class: 'aside' }, `: ${words[v.state]}`))));
  const order = ['unhealthy', 'may fire'];
  const cards = verdicts.filter(v => order.includes(v.state)).sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state));
  document.querySelector('.verdicts').replaceChildren(...cards.map(v => make('article', { class: `verdict ${name(v.state)}` },
    make('h3', {}, make('span', { class: 'word' }, words[v.state]), v.rule), make('p', {}, v.figure),
    make('small', {}, `fires: ${v.threshold}`), make('p', { class: 'advice' }, v.advice, '. ', v.advice.includes(v.flag) ? null : make('code', {}, v.flag)))));
}

function renderCharts(charts) {
  const keys = JSON.stringify(charts.map(chart => [chart.question, chart.is_zero, chart.series.map(series => series.key)]));
  if (keys !== page.chartKeys) {
    page.chartKeys = keys;
    view.charts.forEach(chart => chart instanceof Bars || chart.close());
    view.charts = view.charts.filter(chart => chart instanceof Bars);
    document.querySelectorAll('.charts:not(#charts-time)').forEach(grid => grid.replaceChildren());
    for (const spec of charts.filter(chart => !chart.is_zero || chart.question === 'main')) {
      const grid = document.getElementById(`charts-${spec.question}`);
      new Curves(grid.appendChild(make('figure')), spec);
    }
    for (const group of document.querySelectorAll('.group-of-charts')) {
      const zeros = charts.filter(chart => chart.is_zero && chart.question === group.id).map(chart => chart.title);
      group.querySelector('.zeros').textContent = zeros.length ? `Zero throughout: ${zeros.join(', ')}.` : '';
      group.hidden = !zeros.length && !group.querySelector('figure');
    }
    filterCharts();
  }
  refreshCharts();
}

/* Show the curves whose names hold the wanted text, else the first few of each question. */
function filterCharts() {
  const wanted = document.getElementById('chart-filter').value.trim().toLowerCase();
  for (const group of document.querySelectorAll('.group-of-charts')) {
    const charts = view.charts.filter(chart => group.contains(chart.figure));
    charts.forEach((chart, place) => {
      const names = [chart.title, ...(chart.keys ?? []).map(key => `${key.key} ${key.label}`)].join(' ').toLowerCase();
      chart.figure.hidden = wanted ? !names.includes(wanted) : place >= AT_FIRST && !group.dataset.all;
    });
    if (wanted && charts.some(chart => !chart.figure.hidden)) group.open = true;
    const more = group.querySelector('.more');
    more.textContent = `show ${charts.length - AT_FIRST} more`;
    more.hidden = Boolean(wanted) || group.dataset.all || charts.length <= AT_FIRST;
  }
}

function renderSettings(settings) {
  const changed = settings.flatMap(({ section: name, rows }) => rows.filter(row => row[2] !== null).map(row => [`${name}.${row[0]}`, row[1], row[2]]));
  document.querySelector('.changed').replaceChildren(changed.length ? tableOf(['setting', 'value', 'default'], changed) : make('p', {}, 'Every setting has its default value.'));
  document.querySelector('.sections').replaceChildren(...settings.filter(({ rows }) => rows.length).map(({ section: name, rows }) => make('div', { class: 'section' },
    make('h3', {}, name), make('table', {}, make('tbody', {}, ...rows.map(([field, value, other]) => make('tr', { class: other === null ? 'default' : 'set' }, make('td', {}, field), make('td', {}, value))))))));
}

function tableOf(columns, rows) {
  return make('div', { class: 'scroll' }, make('table', {}, make('thead', {}, make('tr', {}, ...columns.map(name => make('th', {}, name)))),
    make('tbody', {}, ...rows.map(row => make('tr', {}, ...row.map(cell => make('td', {}, cell)))))));
}

function renderTables(tables) {
  const heading = document.getElementById('tables-title');
  document.getElementById('tables').replaceChildren(heading, ...tables.map(table => make('details', { open: true }, make('summary', {}, table.title),
    table.note ? make('p', {}, table.note) : null, table.rows.length ? tableOf(table.columns, table.rows) : null)));
}

function applyZoom() {
  const value = id => { const text = document.getElementById(id).value; return text === '' ? null : Number(text); };
  zoom(value('zoom-from'), value('zoom-to'));
}

function toggleTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === 'dark' ||
    (!document.documentElement.dataset.theme && matchMedia('(prefers-color-scheme: dark)').matches);
  document.documentElement.dataset.theme = dark ? 'light' : 'dark';
  redraw();
}

function redraw() { view.charts.forEach(chart => chart.plot?.redraw(false)); }

function showError(error) {
  const place = document.getElementById('live') || document.querySelector('main').appendChild(make('p', { id: 'live', class: 'error' }));
  place.textContent = error.message;
  place.className = 'error';
}

function showLive() {
  const { steps, total_steps: total } = page.overview;
  const place = document.getElementById('live');
  place.className = '';
  const done = steps ? `step ${steps[1]} of ${total}` : total ? 'no step has finished yet' : '';
  place.textContent = page.source.live ? `live · ${done}` : done;
}

async function update() {
  try {
    const overview = await page.source.overview(page.overview?.revision ?? '');
    if (overview.charts) {
      if (!page.overview) document.querySelector('main').replaceChildren();
      render(overview);
    }
    showLive();
  } catch (error) {
    showError(error);
  }
  if (page.source.live) setTimeout(update, POLL_MS);
}

document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector('dialog[open]')) return;
  if (['INPUT', 'SELECT', 'TEXTAREA'].includes(event.target.tagName)) return;
  const keys = {
    '/': () => document.getElementById('search')?.focus(),
    t: toggleTheme,
    n: () => page.samples?.current?.next != null && page.samples.go(page.samples.current.next),
    p: () => page.samples?.current?.previous != null && page.samples.go(page.samples.current.previous),
    j: () => page.samples?.turn(1),
    k: () => page.samples?.turn(-1),
    a: () => zoom(null, null),
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
update();
