// A stand-in for the explorer's server, to try the page by hand: `npm run sample:explorer` and open the address it prints.
import { createServer, type IncomingMessage } from "node:http";
import type { Outcome, RunAnswer, RunRequest } from "../src/types";
import { makeDocument, pageWith, RECIPES, matrixOf } from "./make";
import { noise, pack } from "./numbers";

const PORT = Number(process.env["PORT"] ?? 8123);
const LIMIT = 512;
const page = makeDocument("explorer");
const html = pageWith(page);
const WORDS = ["(", " the", ")", "self", "\n", "state", ":", ".", "return", "=", " a", "<b>"];

function outcome(tokens: number, at: number, shift: number): Outcome {
  const random = noise(tokens + 7 * at + 1);
  const raw = WORDS.map((text, id) => ({ id, text, probability: random() ** 3 + shift * noise(id + 3)() }));
  const sum = raw.reduce((total, each) => total + each.probability, 0) * 1.3;
  const next = raw
    .map((each) => ({ ...each, probability: each.probability / sum }))
    .sort((a, b) => b.probability - a.probability);
  const random2 = noise(tokens + 2);
  const losses = Array.from({ length: tokens }, (_, i) => (i ? 3 * random2() + shift * (random2() - 0.2) : null));
  const known = losses.filter((value): value is number => value !== null);
  return { loss: known.length ? known.reduce((a, b) => a + b, 0) / known.length : null, token_loss: losses, next };
}

function answer(request: RunRequest): RunAnswer {
  const run = page.runs[request.run];
  const recipe = RECIPES[request.run];
  if (!run || !recipe) throw new Error(`run ${request.run} does not exist; expected 0 to ${page.runs.length - 1}`);
  if (request.text.includes("error")) throw new Error("the text contains <b>error</b>, as asked");
  const all = request.text.match(/\w+|\s|[^\w\s]/gu) ?? [];
  const tokens = all.slice(0, LIMIT);
  const edited = request.edits.length + request.value_edits.length > 0;
  const shift =
    request.edits.reduce((sum, edit) => sum + 0.1 * Math.abs(edit.scale - 1), 0) + request.value_edits.length * 0.2;
  const at = request.token ?? tokens.length - 1;
  const source = run.trace?.table;
  return {
    table: {
      tokens,
      loss: outcome(tokens.length, at, 0).token_loss,
      M: pack(
        tokens.map((_, i) => [matrixOf(recipe, i + 3)]),
        "f16",
      ),
      weights: null,
      values: run.kv_mechanism
        ? pack(
            tokens.map(() => [
              Array.from({ length: 12 }, (_, r) => Array.from({ length: 12 }, (_, c) => (c <= r ? 1 / (r + 1) : 0))),
            ]),
            "f16",
          )
        : null,
      source_names: source?.source_names ?? [],
      reads: source?.reads ?? [],
    },
    plain: outcome(tokens.length, at, 0),
    edited: edited ? outcome(tokens.length, at, shift) : null,
    how: edited
      ? `The model ran with ${request.edits.length} routes scaled at every token${request.renormalise ? ", rows renormalised" : ""}.`
      : null,
    seconds: 0.042,
    truncated: all.length - tokens.length,
  };
}

async function bodyOf(request: IncomingMessage): Promise<string> {
  const parts: Buffer[] = [];
  for await (const part of request) parts.push(part as Buffer);
  return Buffer.concat(parts).toString("utf8");
}

createServer(async (request, response) => {
  if (request.method === "GET") {
    response.writeHead(200, { "Content-Type": "text/html; charset=utf-8" }).end(html);
    return;
  }
  try {
    const body = JSON.stringify(answer(JSON.parse(await bodyOf(request)) as RunRequest));
    response.writeHead(200, { "Content-Type": "application/json" }).end(body);
  } catch (error) {
    response
      .writeHead(400, { "Content-Type": "application/json" })
      .end(JSON.stringify({ error: (error as Error).message }));
  }
}).listen(PORT, "127.0.0.1", () => console.log(`port ${PORT}, path /try/`));
