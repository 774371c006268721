'use strict';
/* Typeset the lines of the objective in MathML: subscripts, sums, fractions, powers; words stay words. */

const FUNCTIONS = new Set(['exp', 'log', 'max', 'min', 'clip', 'sg', 'sigmoid']);
const SIGNS = { '-': '−', '*': '·', '<-': '←', '>=': '≥', '<=': '≤', Σ: '∑' };
const TOKEN = /--[\w-]+|[\w.]+(?:[.:/][A-Za-z_]\w*)+|\d+(?:\.\d+)?(?:e[+-]?\d+)?|\p{L}+(?:_\(|_\w+|\d+)?|<-|>=|<=|\s+|\S/gu;

// The address of MathML's names, from the browser: this file names no address.
const MATHML = new DOMParser().parseFromString('<math></math>', 'text/html').querySelector('math').namespaceURI;

function math(tag, ...children) {
  const element = document.createElementNS(MATHML, tag);
  element.append(...children);
  return element;
}

const row = nodes => nodes.length === 1 ? nodes[0] : math('mrow', ...nodes);
const isSymbol = word => [...word].length === 1;
const isWord = node => node?.localName === 'mtext' || (node?.localName === 'mi' && FUNCTIONS.has(node.textContent)) ||
  node?.firstChild?.textContent === 'KL';

function gap(width) {
  const space = math('mspace');
  space.setAttribute('width', width);
  return space;
}

/* An operator as tall as the line, also where it stands around a sum. */
function sign(text) {
  const operator = math('mo', SIGNS[text] ?? text);
  operator.setAttribute('stretchy', 'false');
  return operator;
}

/* A name: a symbol with its subscript, a function, or a word. */
function named(word) {
  const [, base = word, low, digits] = /^(\p{L}+?)(?:_(\w+)|(\d+))?$/u.exec(word) ?? [];
  const index = low ?? digits;
  if (index && (isSymbol(base) || base === 'KL')) {
    const letters = index.length > 2 ? [math('mtext', index)] : [...index].map(letter => math('mi', letter));
    return math('msub', math('mi', base), row(letters));
  }
  return math(isSymbol(word) || FUNCTIONS.has(word) ? 'mi' : 'mtext', word);
}

/* The nodes of `tokens` up to the ")" that ends them. */
function parsed(tokens, depth = 0) {
  const nodes = [];
  let hasSpace = false, above = null;
  const bare = node => node.inside ?? node; // a fraction bar needs no parentheses
  const add = node => {
    const last = nodes[nodes.length - 1];
    if (above !== null) {
      nodes.push(math('mfrac', bare(above), bare(node)));
      above = null;
      return;
    }
    if (hasSpace && last && last.localName !== 'mo' && last.localName !== 'mspace' && (isWord(last) || isWord(node))) nodes.push(gap('0.3em'));
    nodes.push(node);
  };
  while (tokens.length) {
    const token = tokens.shift();
    if (token === ')') break;
    if (!token.trim()) { hasSpace = true; continue; }
    if (token === '/' && nodes.length && tokens.some(next => next.trim())) {
      above = nodes.pop();
    } else if (token === '(') {
      const inside = parsed(tokens, depth + 1);
      const group = math('mrow', sign('('), ...inside.map(node => node.cloneNode(true)), sign(')'));
      if (inside.length) group.inside = row(inside);
      add(group);
    } else if (token.endsWith('_(')) {
      const low = row(parsed(tokens, depth + 1)), base = token.slice(0, -2);
      add(base === 'Σ' ? math('munder', sign('Σ'), low) : math('msub', math('mi', base), low));
    } else if (/^Σ(_|$)/.test(token)) {
      add(token.length > 1 ? math('munder', sign('Σ'), math('mi', token.slice(2))) : sign('Σ'));
    } else if (token === '²' && nodes.length) {
      nodes.push(math('msup', nodes.pop(), math('mn', '2')));
    } else if (token === '^' && nodes.length && tokens.length) {
      nodes.push(math('msup', nodes.pop(), named(tokens.shift())));
    } else if (/^\d+(\.\d+)?(e[+-]?\d+)?$/.test(token)) {
      add(math('mn', token));
    } else if (/^\p{L}/u.test(token) || token.length > 2) {
      const isArticle = token === 'a' && /^\p{L}{2}/u.test(tokens[1] ?? '');
      add(isArticle ? math('mtext', token) : named(token));
    } else {
      nodes.push(sign(token));
      if (token === ',' && !depth) nodes.push(gap('0.6em'));
    }
    hasSpace = false;
  }
  return above === null ? nodes : [...nodes, above, sign('/')];
}

/* One line of the formula; read aloud as it was written. */
function typeset(line) {
  const element = math('math', ...parsed(line.match(TOKEN) ?? []));
  element.setAttribute('display', 'block');
  element.setAttribute('aria-label', line.trim());
  return element;
}
