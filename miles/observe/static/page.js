'use strict';
/* The page: sections, updates while the run goes on, keys. */

const POLL_MS = 2000;

const page = { source: openSource(), overview: null, samples: null, chartKeys: null };

function section(id, title, note, ...children) {
  const heading = make('h2', { id: `${id}-title` }, title, note ? make('small', {}, note) : null);
  return make('section', { id, 'aria-labelledby': `${id}-title` }, heading, ...children);
}

function build(overview) {
  const main = document.querySelector('main');
  const titles = [['health', 'Health'], ['curves', 'Curves'], ['time', 'Time'], ['engine', 'Engine'], ['samples', 'Samples'], ['more', 'More curves'], ['settings', 'Settings']];
  const parts = overview.tables ? [['curves', 'Curves'], ['tables', 'Differences']] : titles;
  const smoothing = make('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: view.smoothing, id: 'smoothing', oninput: event => { view.smoothing = Number(event.target.value); refreshCharts(); } });
  const bound = id => make('input', { type: 'number', id, placeholder: id === 'zoom-from' ? 'first' : 'last', 'aria-label': id === 'zoom-from' ? 'first step shown' : 'last step shown', onchange: applyZoom });
  const controls = make('div', { class: 'controls' }, make('label', {}, 'smoothing ', smoothing), make('label', {}, 'steps ', bound('zoom-from'), ' to ', bound('zoom-to')),
    make('button', { id: 'zoom-all', onclick: () => zoom(null, null) }, 'all steps'),
    make('input', { type: 'search', id: 'chart-filter', placeholder: 'curves by name', 'aria-label': 'show curves whose name contains', oninput: filterCharts }));
  main.append(
    make('header', {}, make('h1', {}), make('span', { id: 'live', role: 'status' }), make('button', { id: 'theme', onclick: toggleTheme, title: 't' }, 'light / dark')),
    make('nav', { 'aria-label': 'sections' }, ...parts.map(([id, title]) => make('a', { href: `#${id}` }, title))),
    make('p', { class: 'objective' }), make('pre', { class: 'formula' }), make('div', { class: 'tiles' }));
  if (overview.tables) {
    main.append(section('curves', 'Curves', '', controls, make('div', { class: 'charts', id: 'charts-learning' })), section('tables', 'Differences', ''));
    return;
  }
  main.append(
    section('health', 'Health', '', make('div', { class: 'verdicts' })),
    section('curves', 'Curves', 'drag to zoom, faint: each step', controls, make('div', { class: 'charts', id: 'charts-learning' })),
    section('time', 'Time', 'each second is in one phase', make('div', { class: 'charts wide', id: 'charts-time' })),
    section('engine', 'Engine', 'utilization, staleness, memory', make('div', { class: 'charts', id: 'charts-engine' })),
    section('samples', 'Samples', 'select an answer for its tokens'),
    section('more', 'More curves', '', make('div', { class: 'charts', id: 'charts-more' })),
    section('settings', 'Settings', 'bold: not the default', make('div', { class: 'sections' })));
  new Bars(document.getElementById('charts-time').appendChild(make('figure')), 'Seconds by phase', 'of every iteration');
  page.samples = new SampleBrowser(document.getElementById('samples'));
}

function render(overview) {
  if (!page.overview) build(overview);
  const before = page.overview;
  page.overview = overview;
  document.title = overview.title;
  document.querySelector('h1').textContent = overview.folder ? `${overview.title}: ${overview.folder}` : overview.title;
  document.querySelector('.objective').textContent = overview.words || '';
  document.querySelector('.formula').textContent = overview.formula || '';
  document.querySelector('.formula').hidden = !overview.formula;
  document.querySelector('.tiles').replaceChildren(...overview.tiles.map(tile => make('div', { class: 'tile' }, make('span', {}, tile.label), make('b', {}, tile.value), make('small', {}, tile.remark))));
  renderCharts(overview.charts);
  if (overview.tables) return renderTables(overview.tables);
  renderVerdicts(overview.verdicts);
  if (!before) renderSettings(overview.settings);
  page.samples.refresh().catch(showError);
  return undefined;
}

function renderVerdicts(verdicts) {
  const words = { ok: 'healthy', unhealthy: 'unhealthy', 'no data': 'no data' };
  const order = ['unhealthy', 'ok', 'no data'];
  const sorted = [...verdicts].sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state));
  document.querySelector('.verdicts').replaceChildren(...sorted.map(v => make('article', { class: `verdict ${v.state.replace(' ', '-')}` },
    make('h3', {}, make('span', { class: 'state' }, words[v.state]), v.rule), make('p', {}, v.figure),
    make('small', {}, `fires: ${v.threshold}`), v.state === 'unhealthy' ? make('p', { class: 'advice' }, v.advice, ' ', make('code', {}, v.flag)) : null)));
}

function renderCharts(charts) {
  const keys = JSON.stringify(charts.map(chart => chart.series.map(series => series.key)));
  if (keys !== page.chartKeys) {
    page.chartKeys = keys;
    view.charts.forEach(chart => chart instanceof Bars || chart.close());
    view.charts = view.charts.filter(chart => chart instanceof Bars);
    document.querySelectorAll('.charts:not(#charts-time)').forEach(grid => grid.replaceChildren());
    for (const spec of charts) {
      const grid = document.getElementById(`charts-${spec.section}`) || document.getElementById('charts-learning');
      new Curves(grid.appendChild(make('figure')), spec);
    }
    filterCharts();
    for (const id of ['engine', 'more']) {
      const part = document.getElementById(id);
      if (part) part.hidden = !part.querySelector('figure');
    }
  }
  refreshCharts();
}

function filterCharts() {
  const wanted = document.getElementById('chart-filter').value.toLowerCase();
  for (const chart of view.charts) {
    if (!(chart instanceof Curves)) continue;
    const names = [chart.title, ...chart.keys.map(key => `${key.key} ${key.label}`)].join(' ').toLowerCase();
    chart.figure.hidden = !names.includes(wanted);
  }
}

function renderSettings(settings) {
  document.querySelector('.sections').replaceChildren(...settings.map(({ section: name, rows }) => {
    const changed = rows.filter(row => row[2]).length;
    return make('details', { open: changed > 0 }, make('summary', {}, name, make('small', {}, ` ${changed} of ${rows.length} differ from the default`)),
      make('table', {}, make('tbody', {}, ...rows.map(([field, value, set]) => make('tr', { class: set ? 'set' : 'default' }, make('td', {}, field), make('td', {}, value))))));
  }));
}

function renderTables(tables) {
  const heading = document.getElementById('tables-title');
  document.getElementById('tables').replaceChildren(heading, ...tables.map(table => make('div', { class: 'scroll' }, make('h3', {}, table.title),
    table.note ? make('p', {}, table.note) : null,
    table.rows.length ? make('table', {}, make('thead', {}, make('tr', {}, ...table.columns.map(name => make('th', {}, name)))),
      make('tbody', {}, ...table.rows.map(row => make('tr', {}, ...row.map(cell => make('td', {}, cell)))))) : null)));
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
  place.textContent = !page.source.live ? '' : steps ? `live · step ${steps[1]} of ${total}` : 'live · no step has finished yet';
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
    a: () => zoom(null, null),
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
update();
