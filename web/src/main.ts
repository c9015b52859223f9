// Reads the document, then draws the page: navigation, explorer if there is one, and the sections of the report.
import "./styles/base.css";
import "./styles/parts.css";
import "./styles/controls.css";
import "./styles/tables.css";
import "./styles/explorer.css";
import "./styles/figures.css";
import "./styles/print.css";
import { append, el, userText, type Child } from "./dom";
import { explorer } from "./explorer/panel";
import { visible } from "./format";
import { sectionNode, type Section } from "./section";
import { depthSection } from "./sections/depth";
import { importanceSection } from "./sections/importance";
import { lossSection } from "./sections/loss";
import { matrixSection } from "./sections/matrix";
import { about, cost, findings, health } from "./sections/plain";
import { rankSection } from "./sections/rank";
import { routesSection } from "./sections/routes";
import { tokensSection } from "./sections/tokens";
import { trainingSection } from "./sections/training";
import { verdict } from "./sections/verdict";
import { themeButton } from "./theme";
import type { PageDocument } from "./types";

const REPORT: Section[] = [
  verdict,
  lossSection,
  matrixSection,
  tokensSection,
  routesSection,
  depthSection,
  trainingSection,
  importanceSection,
  rankSection,
  health,
  cost,
  findings,
  about,
];
const FORMAT = 1;

function readDocument(): PageDocument | null | string {
  const text = document.getElementById("document")?.textContent ?? "null";
  try {
    const page = JSON.parse(text) as PageDocument | null;
    if (page && page.format !== FORMAT)
      return `This page shows documents of format ${FORMAT}; its document has format ${page.format}. Make the page again with one version of depthmix.`;
    return page;
  } catch (error) {
    return `The page's document is damaged (${(error as Error).message}). Make the page again.`;
  }
}

/** A section that fails says so and leaves the others alone. */
function drawn(section: Section, page: PageDocument): HTMLElement | null {
  let body: Child[] | null;
  try {
    body = section.draw(page);
  } catch (error) {
    console.error(error);
    body = [
      el(
        "p",
        { class: "absent", role: "alert" },
        `This section could not be drawn: ${visible((error as Error).message)}`,
      ),
    ];
  }
  return body && sectionNode(section, body);
}

function navigation(sections: Section[]): HTMLElement {
  const links = sections.map((section) => el("li", {}, el("a", { href: `#${section.id}` }, section.label)));
  return el("nav", { "aria-label": "Sections" }, el("ul", {}, ...links));
}

/** Marks the link of the section that is being read. */
function followReading(nav: HTMLElement, nodes: HTMLElement[]): void {
  const watcher = new IntersectionObserver(
    (entries) => {
      const top = entries.find((entry) => entry.isIntersecting);
      if (!top) return;
      nav.querySelectorAll("a").forEach((link) => {
        if (link.getAttribute("href") === `#${top.target.id}`) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      });
    },
    { rootMargin: "-15% 0px -75% 0px" },
  );
  nodes.forEach((node) => watcher.observe(node));
}

function header(page: PageDocument): HTMLElement {
  const made = page.made ?? {};
  const words = [
    page.kind === "explorer" ? "Explorer" : "Report",
    `${page.runs.length} ${page.runs.length === 1 ? "run" : "runs"}`,
    made["depthmix"] ? `depthmix ${made["depthmix"]}` : "",
    made["date"] ?? "",
  ].filter(Boolean);
  return el(
    "header",
    { class: "top" },
    el("div", {}, el("h1", {}, userText(page.title)), el("p", { class: "by" }, userText(words.join(" · ")))),
    themeButton(),
  );
}

function show(page: PageDocument): Child[] {
  document.title = visible(page.title);
  const report = page.runs.length ? REPORT : [verdict, about];
  const sections = page.kind === "explorer" ? [explorer, ...report] : report;
  const pairs = sections.flatMap((section) => {
    const node = drawn(section, page);
    return node ? [{ section, node }] : [];
  });
  const nav = navigation(pairs.map(({ section }) => section));
  followReading(
    nav,
    pairs.map(({ node }) => node),
  );
  return [
    el("a", { class: "skip", href: "#content" }, "Skip to the content"),
    header(page),
    el("div", { class: "columns" }, nav, el("main", { id: "content", tabindex: -1 }, ...pairs.map(({ node }) => node))),
  ];
}

function message(title: string, text: string): Child[] {
  return [
    el("header", { class: "top" }, el("h1", {}, title), themeButton()),
    el("main", { id: "content" }, el("p", { class: "absent" }, text)),
  ];
}

const root = document.getElementById("page");
const page = readDocument();
if (root) {
  if (page === null)
    append(
      root,
      ...message(
        "depthmix",
        "This page contains no data. Write one with data by `depthmix report`, or open the explorer with `depthmix explore`.",
      ),
    );
  else if (typeof page === "string") append(root, ...message("depthmix", page));
  else append(root, ...show(page));
}
