// Settings of MathJax 3.2.2, which draws the formulas of a page. It is the file tex-svg.js of its npm package, and must be
// loaded after this one. pymdownx.arithmatex marks formulas: \( … \) in the text, \[ … \] on their own. MathJax has its
// fonts inside; its menu and the packages that it would load on its own are off, so that a page asks for no further file.
window.MathJax = {
  tex: {
    inlineMath: [["\\(", "\\)"]],
    displayMath: [["\\[", "\\]"]],
    packages: { "[-]": ["autoload", "require"] },
  },
  options: { enableMenu: false, ignoreHtmlClass: ".*", processHtmlClass: "arithmatex" },
};
