// Settings of MathJax 3.2.2 (mathjax/tex-svg.js), which draws the formulas of a page. It must be loaded after this file.
// pymdownx.arithmatex marks them: \( … \) in the text, \[ … \] on their own. tex-svg.js has its fonts inside; the menu
// and the packages that it would load by itself are off, so that a page asks for no further file.
window.MathJax = {
  tex: {
    inlineMath: [["\\(", "\\)"]],
    displayMath: [["\\[", "\\]"]],
    packages: { "[-]": ["autoload", "require"] },
  },
  options: { enableMenu: false, ignoreHtmlClass: ".*", processHtmlClass: "arithmatex" },
};
