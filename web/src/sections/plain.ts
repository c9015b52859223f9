// Sections that are words and tables: health, cost, findings, about.
import { el, userText, type Child } from "../dom";
import { plural } from "../format";
import { optionsText } from "../names";
import { absent, named, paragraph, type Section } from "../section";
import { table, type Cell } from "../table";
import type { Finding, Health, PageDocument } from "../types";
import { runCell } from "./verdict";

const ICONS: Record<Health["level"], string> = { good: "✓", notice: "!", problem: "✕", unknown: "?" };
const ORDER: Health["level"][] = ["problem", "notice", "unknown", "good"];

function badge(level: Health["level"]): HTMLElement {
  return el(
    "span",
    { class: `badge ${level}` },
    el("span", { "aria-hidden": "true" }, ICONS[level] ?? "?"),
    ` ${level}`,
  );
}

function check(health: Health): HTMLElement {
  return el(
    "li",
    { class: `check ${health.level}` },
    el(
      "div",
      { class: "check-head" },
      badge(health.level),
      el("strong", {}, userText(health.name)),
      el("span", { class: "figure-text" }, userText(health.figure)),
    ),
    el("p", {}, userText(health.meaning)),
    health.remedy && health.level !== "good"
      ? el("p", { class: "remedy" }, el("strong", {}, "What to do: "), userText(health.remedy))
      : null,
  );
}

export const health: Section = {
  id: "health",
  label: "Health",
  title: "Health",
  intro: "Signs of known troubles of depth mixing, worst first.",
  draw: (page) => {
    const all = named(page);
    const runs = all.filter(({ run }) => run.health.length);
    const cards = runs.map((each) => {
      const sorted = [...each.run.health].sort((a, b) => ORDER.indexOf(a.level) - ORDER.indexOf(b.level));
      return el(
        "article",
        { class: "card" },
        el("h3", {}, runCell(each)),
        el("ul", { class: "checks" }, ...sorted.map(check)),
      );
    });
    return [
      cards.length ? el("div", { class: "two" }, ...cards) : null,
      absent(all, (run) => run.health.length > 0, /health/i, "no health checks were made."),
    ];
  },
};

export const cost: Section = {
  id: "cost",
  label: "Cost",
  title: "Cost",
  intro: "What the mechanism takes in time, memory and parameters.",
  draw: (page) => {
    const known = page.study?.cost;
    if (known?.cells.length) {
      return [
        table({ caption: "Cost.", headings: known.headings, rows: known.cells }),
        known.note ? paragraph(userText(known.note)) : null,
      ];
    }
    return [
      el(
        "p",
        { class: "absent" },
        page.study
          ? "The study has no table of cost."
          : "Cost is compared in a study; this page shows no study. Each run's own figures are in the table of runs above.",
      ),
    ];
  },
};

const VERDICTS: Record<Finding["verdict"], [Health["level"], string]> = {
  seen: ["good", "seen"],
  "not seen": ["unknown", "not seen"],
  unclear: ["notice", "unclear"],
  opposite: ["problem", "opposite"],
};

export const findings: Section = {
  id: "findings",
  label: "Findings",
  title: "Findings",
  intro:
    "Observations of arXiv 2603.15031 (Attention Residuals) held against these runs. Claims whose arms are not in the report are left out.",
  draw: (page) => {
    if (!page.findings?.length) {
      return [
        el(
          "p",
          { class: "absent" },
          "Findings are checked where a study has runs of Attention Residuals and of a residual; there are none here.",
        ),
      ];
    }
    const rows = page.findings.map((each): Cell[] => {
      const [level, text] = VERDICTS[each.verdict] ?? ["unknown", each.verdict];
      const mark = el(
        "span",
        { class: `badge ${level}` },
        el("span", { "aria-hidden": "true" }, { good: "✓", unknown: "–", notice: "?", problem: "⇄" }[level]),
        " ",
        /one seed\W*$/i.test(each.figure) ? `${text} (one seed)` : text,
      );
      return [userText(each.claim), mark, userText(each.figure), userText(each.note)];
    });
    return [
      table({
        caption: "Claims and what was measured.",
        headings: ["claim", "here", "figure", "note"],
        rows,
        numeric: [],
      }),
    ];
  },
};

function description(entries: [string, Child][]): HTMLElement {
  return el(
    "dl",
    { class: "about" },
    ...entries.flatMap(([term, text]) => [el("dt", {}, userText(term)), el("dd", {}, text)]),
  );
}

function origin(page: PageDocument): [string, Child][] {
  const digest = document.querySelector<HTMLMetaElement>('meta[name="depthmix-web"]')?.content ?? "";
  const made = Object.entries(page.made ?? {}).map(([key, value]): [string, Child] => [
    key,
    key === "command" ? el("code", {}, userText(String(value))) : userText(String(value)),
  ]);
  const study = Object.entries(page.study?.about ?? {}).map(([key, value]): [string, Child] => [
    key,
    userText(String(value)),
  ]);
  return [...made, ...study, ["page", el("code", {}, digest.slice(0, 16))]];
}

export const about: Section = {
  id: "about",
  label: "About",
  title: "About this page",
  intro: "Everything needed to make it again.",
  draw: (page) => {
    const rows = named(page).map((each): Cell[] => {
      const { run } = each;
      const hash = (name: string): Cell =>
        run.hashes[name] ? el("code", { title: run.hashes[name] }, String(run.hashes[name]).slice(0, 12)) : null;
      return [
        runCell(each),
        run.seed === null ? "–" : String(run.seed),
        hash("config"),
        hash("data"),
        hash("weights"),
        run.trace ? `${plural(run.trace.tokens, "token")} of ${run.trace.text.source}` : "none",
        userText(optionsText(run) || "–"),
      ];
    });
    return [
      description(origin(page)),
      rows.length
        ? table({
            caption: "Seeds, hashes and traces.",
            headings: ["run", "seed", "configuration", "data", "weights", "trace", "options"],
            rows,
            numeric: [1],
          })
        : null,
    ];
  },
};
