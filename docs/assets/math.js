// Typeset what pymdownx.arithmatex marked: \(…\) in a line, \[…\] on its own.
document.querySelectorAll(".arithmatex").forEach((element) => {
  const source = element.textContent.trim();
  katex.render(source.slice(2, -2), element, { displayMode: source.startsWith("\\["), throwOnError: false });
});
