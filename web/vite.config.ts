// Builds the page into one file: all scripts and styles inlined, stamped with the digest of the sources it was built from.
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";

const WEB = dirname(fileURLToPath(import.meta.url));
const PAGE = resolve(WEB, "../src/depthmix/report/page.html");
const SINGLE = ["index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"];
const PLACEHOLDER = "sha256-of-sources";
const DOCUMENT = '<script type="application/json" id="document">null</script>';

/** The same as sources_digest of tools/web_sources.py. */
function sourcesDigest(): string {
  const nested = readdirSync(join(WEB, "src"), { recursive: true, withFileTypes: true });
  const files = nested.filter((entry) => entry.isFile()).map((entry) => join(entry.parentPath, entry.name));
  const paths = [...SINGLE, ...files.map((file) => file.slice(WEB.length + 1).replaceAll("\\", "/"))].sort();
  const whole = createHash("sha256");
  for (const path of paths) {
    const content = createHash("sha256")
      .update(readFileSync(join(WEB, path)))
      .digest("hex");
    whole.update(`${path}\n${content}\n`);
  }
  return whole.digest("hex");
}

/** Replaces links to scripts and styles by their text and writes the page. */
function onePage(): Plugin {
  return {
    name: "one-page",
    apply: "build",
    enforce: "post",
    generateBundle(_, bundle) {
      let html = "";
      const texts = new Map<string, string>();
      for (const [name, part] of Object.entries(bundle)) {
        const text = part.type === "chunk" ? part.code : String(part.source);
        if (name.endsWith(".html")) html = text;
        else texts.set(name, text.trim());
      }
      for (const [name, text] of texts) {
        const script = new RegExp(`<script[^>]*src="[^"]*${name}"[^>]*></script>`);
        const style = new RegExp(`<link[^>]*href="[^"]*${name}"[^>]*>`);
        html = html.replace(
          script,
          () => `<script type="module">${text.replace(/<(\/script|!--)/gi, "\\x3c$1")}</script>`,
        );
        html = html.replace(style, () => `<style>${text}</style>`);
      }
      html = html.replace(PLACEHOLDER, sourcesDigest());
      if (html.split(DOCUMENT).length !== 2) throw new Error(`the page must contain exactly one line ${DOCUMENT}`);
      if (/(src|href)="(?!data:)[^"#]/.test(html.split("<script")[0] ?? ""))
        throw new Error("the page links to another file");
      mkdirSync(dirname(PAGE), { recursive: true });
      writeFileSync(`${PAGE}.part`, html);
      renameSync(`${PAGE}.part`, PAGE);
      console.log(`page.html: ${(html.length / 1024).toFixed(0)} KiB`);
    },
  };
}

export default defineConfig({
  root: WEB,
  build: {
    write: false,
    target: "es2022",
    modulePreload: { polyfill: false },
    cssCodeSplit: false,
    assetsInlineLimit: 1e6,
    chunkSizeWarningLimit: 600,
    reportCompressedSize: false,
  },
  plugins: [onePage()],
});
