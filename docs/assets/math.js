// Typeset what pymdownx.arithmatex marked: \(…\) in a line, \[…\] on its own.
document.querySelectorAll(".arithmatex").forEach((element) => {
  const source = element.textContent.trim();
  const displayMode = source.startsWith("\\[");
  element.classList.toggle("short", !displayMode && source.length < 40); // fits into a line: not to be broken
  katex.render(source.slice(2, -2), element, { displayMode, throwOnError: false });
});
