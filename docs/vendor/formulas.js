// Draw the formulas of a page with KaTeX. pymdownx.arithmatex marks them: \( … \) in the text, \[ … \] on their own.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const source = place.textContent.trim().slice(2, -2); // without the two delimiters
    katex.render(source, place, { displayMode: place.tagName === "DIV" });
  }
});
