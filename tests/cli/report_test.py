# SPDX-License-Identifier: Apache-2.0
"""The page of python/tierkv/report.py: self-contained, complete, small, with the JSON's numbers, and rendered by a browser without complaint.

The browser is Debian's chromium (./dev setup installs it). Where there is none, those tests are skipped by name.
"""
import html.parser
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import unittest

import numpy as np

from cli import ROOT, CliTest, Dump, main, run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REAL, PROFILE = ROOT / "datasets/smollm2_1k.h5", ROOT / "datasets/smollm2_1k_profile.h5"
QUALITY = ROOT / "bench/results/quality_smollm2.json"
FIGURES = ["Memory against attention error", "Memory against KL of the model's predictions", "Heads by sensitivity", "Exponents of tokens",
           "Classes of heads", "Tiers per layer and head", "Quantisation codes", "Error along the sequence",
           "Significance, value norms and key norms of tokens", "Significance along one row", "Critical tokens by layer",
           "Critical tokens by layer and head"]
PRESETS = ["small", "small:k=0.3,v=0.25", "fast", "k8v4", "diffkv", "kivi2", "kvcomp", "step", "fp16"]
COLUMNS = ["bits_per_value", "ratio", "page_ratio", "attention_pooled_error", "attention_weighted_error", "attention_rel_error_online",
           "key_rel_error", "value_rel_error", "key_coded_bits", "value_coded_bits", "window", "sinks", "encode_gbps", "decode_gbps"]

# Run in the page: what lies outside its picture, pictures without size, and what the browser threw.
PROBE = """<script>
const bad = [];
window.addEventListener('error', e => bad.push('error: ' + e.message));
window.addEventListener('load', () => {
  const svgs = [...document.querySelectorAll('svg')];
  for (const svg of svgs) {
    const frame = svg.getBoundingClientRect(), name = svg.getAttribute('aria-label');
    if (frame.width < 200 || frame.height < 60) bad.push(name + ': ' + frame.width + ' x ' + frame.height);
    for (const e of svg.querySelectorAll('text, use, image')) {
      const b = e.getBoundingClientRect();
      if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
        bad.push(name + ': outside: ' + (e.textContent || e.outerHTML).slice(0, 80));
      if (e.tagName == 'text' && b.width == 0) bad.push(name + ': invisible text');
    }
    const texts = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [a, s] of texts)
      for (const [b, t] of texts)
        if (s !== t && s.left + 0.5 < t.right && t.left + 0.5 < s.right && s.top + 2.5 < t.bottom && t.top + 2.5 < s.bottom)
          bad.push(name + ': ' + a + ' lies on ' + b);
  }
  for (const e of document.querySelectorAll('.scroll:not(details *)'))
    if (e.scrollWidth > e.clientWidth) bad.push('a table is clipped: ' + e.scrollWidth + ' of ' + e.clientWidth);
  const table = document.querySelector('table.sort'), cells = () => [...table.tBodies[0].rows].map(r => Number(r.cells[2].dataset.v));
  const rises = x => x.every((v, i) => i == 0 || x[i - 1] <= v), head = table.querySelectorAll('th button')[2];
  head.click();
  const up = rises(cells());
  head.click();
  document.title = JSON.stringify({pictures: svgs.length, bad: bad, sorted: up && rises(cells().reverse())});
});
</script>"""


def browse(page, folder, *flags):
    """(stdout, what the page said on the console) of a headless browser."""
    env = dict(os.environ, HOME=str(folder))
    r = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
                        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--window-size=1200,900", *flags,
                        page.as_uri()], capture_output=True, text=True, timeout=120, env=env)
    return r.stdout, [line for line in r.stderr.splitlines() if "CONSOLE" in line]


class Reader(html.parser.HTMLParser):
    """titles: of figures; labels: of pictures; tables: lists of rows, a row a list of (text, exact value)."""

    def __init__(self, text):
        super().__init__()
        self.labels, self.tables, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "svg":
            self.labels.append(attributes.get("aria-label"))
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(["", attributes.get("data-v")])

    def handle_data(self, data):
        self.words.append(data.strip())
        if self.tables and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1][0] += data.strip()


def draw(*args, **more):
    env = dict(os.environ, MPLBACKEND="agg", PYTHONWARNINGS="error::UserWarning")
    return subprocess.run([sys.executable, "-B", ROOT / "tools/report.py", *map(str, args)], capture_output=True, text=True, timeout=300, env=env, **more)


class Report(CliTest):
    maxDiff = None
    shared = None

    def results(self, *args, command="analyze"):
        r = run(command, "--json", "--details", *args)
        self.assertEqual(r.returncode, 0, f"seed {self.seed}: {r.stderr}")
        path = self.dir / "results.json"
        path.write_text(r.stdout)
        return path

    def report(self, results, *args):
        page = self.dir / "report.html"
        r = draw(results, "-o", page, "--force", *args)
        self.assertEqual(r.returncode, 0, f"seed {self.seed}: {r.stderr}")
        self.assertEqual(list(self.dir.glob("*.part")), [])
        self.assertLessEqual(page.stat().st_size, 1_000_000)
        return page

    def real(self):
        """(results, page) of the shipped cache of a real model, made once for all tests."""
        results, page = self.dir / "results.json", self.dir / "report.html"
        if Report.shared is None:
            self.results(*(w for p in PRESETS for w in ("--preset", p)), "--profile", PROFILE, REAL)
            self.report(results, "--kl", QUALITY)
            Report.shared = results.read_text(), page.read_text()
        results.write_text(Report.shared[0]), page.write_text(Report.shared[1])
        return json.loads(Report.shared[0]), page

    def test_every_figure_is_there(self):
        _, page = self.real()
        found = Reader(page.read_text())
        self.assertEqual(len(found.labels), len(FIGURES))
        self.assertTrue(all(found.labels), "a picture without a description")
        self.assertEqual([f for f in FIGURES if f not in found.words], [])
        self.assertEqual(page.read_text().count("<figcaption>"), len(FIGURES))
        ids = re.findall(r'\bid="([^"]+)"', page.read_text())
        self.assertEqual(len(ids), len(set(ids)))

    def test_nothing_is_fetched(self):
        text = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=\s]+", "", self.real()[1].read_text())
        for reference in (r"https?:", r"<link", r"@import", r"\bsrc=", r'\bhref="(?!#|")', r"url\((?!#)", r"//\w"):
            self.assertIsNone(re.search(reference, text), reference)

    def test_numbers_are_those_of_the_json(self):
        data, page = self.real()
        rates, kl = Reader(page.read_text()).tables[:2]
        totals = {r["preset"]: r for r in data["results"] if r["seq"] == "all"}
        self.assertEqual({row[1][0] for row in rates[1:]}, set(PRESETS))
        value = lambda cell: float(cell[1]) if cell[1] else None
        for row in rates[1:]:
            r = totals[row[1][0]]
            self.assertAlmostEqual(value(row[2]), 100 / r["ratio"], places=9)
            self.assertEqual([value(c) for c in row[3:17]], [r[c] for c in COLUMNS])
            self.assertEqual([value(c) for c in row[17:]], [100 * r["tiers"][t] for t in ("window", "high", "low", "pruned")])
        size = json.loads(QUALITY.read_text())["sizes"][0]
        self.assertEqual([row[0][0] for row in kl[1:]], [s["name"] for s in size["schemes"]])
        common = min(len(s["kl"]) for s in size["schemes"])
        for row, s in zip(kl[1:], size["schemes"]):
            for cell, task in zip(row[2:4], ("text", "lookup")):
                at = [i for i in range(common) if size["prompts"][i]["task"] == task]
                self.assertAlmostEqual(value(cell), np.mean([s["kl"][i] for i in at]), places=9)
            self.assertEqual(row[4][0] != "-", s["name"] in PRESETS)

    def test_the_front_is_the_sweeps(self):
        results = self.results("--preset", "k2v2/k4v4/k8v8+/huffman", "--preset", "kivi2", REAL, command="sweep")
        front = {r["preset"] for r in json.loads(results.read_text())["results"] if r["pareto"]}
        marked = re.findall(r"<tr class=front><td>\d+<td class=text>([^<]+)<", self.report(results).read_text())
        self.assertEqual(set(marked), front)

    def test_details_are_those_of_numpy(self):
        dump = Dump(seed=self.seed, layers=2, q_heads=4, kv_heads=2, tokens=150, queries=100)
        data = json.loads(self.results("--preset", "diffkv:window=10,sinks=0", "--preset", "k4v4", dump.write(self.dir / "d.h5")).read_text())
        share = lambda x: (np.searchsorted(np.cumsum(np.sort(x)[::-1]), 0.95 * x.sum() * (1 - 1e-12)) + 1) / len(x)
        survey, tiers = data["surveys"][0], data["results"][0]["detail"]["tiers"]
        for l in range(2):
            get = lambda name: dump.data[f"/seq/a/layer/{l}/{name}"].astype(np.float64)
            for h in range(2):
                shares = []
                for i in np.arange(64) * 100 // 64:
                    seen = int(get("q_positions")[i]) + 1
                    for q in get("q")[2 * h:2 * h + 2, i]:
                        logits = get("k")[h, :seen] @ q * dump.attrs["sm_scale"]
                        shares.append(share(np.exp(logits - logits.max())))
                s = get("significance")[h]
                high = int((s[:140] >= 1 / np.arange(1, 141)).sum())
                # A sum of up to 150 rounded weights may cross 95% one token early or late.
                self.assertAlmostEqual(survey["critical_of_query"]["mean"][l][h], np.mean(shares), delta=1 / 150, msg=f"seed {self.seed}")
                self.assertAlmostEqual(survey["critical_received"]["mean"][l][h], share(s * np.arange(149, -1, -1)), delta=1 / 150,
                                       msg=f"seed {self.seed}")
                self.assertEqual([tiers[t][l][h] for t in ("window", "high", "low", "pruned")], [10, high, 140 - high, 0], f"seed {self.seed}")

    def test_exponents_and_classes_are_of_all_heads(self):
        data, _ = self.real()
        small, fast = (next(r["detail"] for r in data["results"] if r["preset"] == p and r["seq"] == "all") for p in ("small", "fast"))
        for c in ("key", "value"):
            self.assertEqual(sum(n for _, n in small["exponents"][c]), 8 * 3 * (1024 - 64 - 4))
            self.assertEqual(fast["exponents"][c], [])
        kl, classes = np.array(data["profile"]["joint_sensitivity"]).ravel(), np.array(fast["classes"]).ravel()
        for c in range(2):
            self.assertGreaterEqual(kl[classes == c].min(), kl[classes > c].max())
        self.assertIsNone(small["classes"])

    def test_several_dumps_and_shapes(self):
        paths = [Dump(seed=self.seed + i, tokens=90 + 40 * i).write(self.dir / f"{i}.h5") for i in range(2)]
        other = Dump(seed=self.seed, layers=3, tokens=70).write(self.dir / "other.h5")
        page = self.report(self.results("--preset", "diffkv/k4v4:window=8", *paths, command="sweep")).read_text()
        self.assertEqual(page.count("Rate and distortion: "), 3)
        self.assertIn("all dumps together", page)
        self.assertEqual(page.count("Maps of the share of critical tokens"), 1)
        page = self.report(self.results("--preset", "diffkv/k4v4:window=8", paths[0], other, command="sweep")).read_text()
        self.assertEqual(page.count("Maps of the share of critical tokens"), 2)

    def test_a_default_sweep_fits(self):
        page = self.report(self.results("--profile", PROFILE, REAL, command="sweep"), "--kl", QUALITY)
        self.assertNotIn("are left out: the page", page.read_text())
        self.render(page)

    def test_what_is_missing_is_said(self):
        dump = Dump(seed=self.seed, queries=0)
        dump.data = {k: v for k, v in dump.data.items() if "significance" not in k}
        text = self.report(self.results("--preset", "k4v4", dump.write(self.dir / "bare.h5"))).read_text()
        for words in ("the dump has no queries", "hold no significance", "neither q nor significance"):
            self.assertIn(words, text)
        plain = self.dir / "plain.json"
        plain.write_text(run("analyze", "--json", "--preset", "k4v4", REAL).stdout)
        self.assertIn("without --details", self.report(plain).read_text())

    def test_odd_shapes_and_names(self):
        for layers, heads, tokens, name in ((1, 1, 1, "one & only <b>.h5"), (40, 8, 9, "many.h5")):
            path = Dump(seed=self.seed, layers=layers, q_heads=heads, kv_heads=heads, tokens=tokens, head_dim=64).write(self.dir / name)
            page = self.report(self.results("--preset", "diffkv:window=0", "--preset", "fp16", "--preset", "k1v1", path))
            self.assertNotRegex(page.read_text(), r">(nan|inf)<|<b>")
            self.render(page)

    def test_bad_files_are_named_with_the_field(self):
        data, page = self.real()
        good, bad = json.dumps(data), self.dir / "bad.json"
        page.unlink()

        def change(*keys, to):
            out = json.loads(good)
            at = out
            for k in keys[:-1]:
                at = at[k]
            at[keys[-1]] = to
            return json.dumps(out)

        first = ("results", 0)
        for text, words in ((good[:1000], "is not JSON"), ("[1]", "schema"), (change("schema", to="tierkv.analyze/9"), "tierkv.analyze/9"),
                            ("[" * 100000, "is not JSON"), (change("results", to={}), "results: expected a list"), (change("results", to=[]), "no totals"),
                            (change(*first, "ratio", to=0), "results[0].ratio: expected a number above 0, found 0"),
                            (change(*first, "preset", to=None), "preset is missing"), (change(*first, "ratio", to="x"), "results[0].ratio"),
                            (change(*first, "bits_per_value", to=10**400), "bits_per_value"), (change(*first, "key_rel_error", to=-1), "key_rel_error"),
                            (change(*first, "key_rel_error", to=float("inf")), "key_rel_error"),
                            (change(*first, "detail", "codes", "key", "high", to=[[1]]), "results[0].detail.codes.key.high[0]: expected a pair"),
                            (change(*first, "detail", "tiers", "low", to=[[1], [1, 2]]), "results[0].detail.tiers.low: its rows differ"),
                            (change(*first, "detail", "tiers", "low", to=[[1]]), "results[0].detail.tiers: lengths"),
                            (change("profile", "joint_sensitivity", to=[["x"]]), "profile.joint_sensitivity[0][0]"),
                            (change("surveys", 0, "num_layers", to=7), "surveys[0]: lengths"), (change("surveys", 0, "trace", "max", to=[]), "surveys[0].trace")):
            bad.write_text(text)
            self.expect(draw(bad, "-o", page), 3, bad, words)
        self.expect(draw(self.dir / "none.json", "-o", page), 3, "none.json", "cannot be read")
        good_file = self.dir / "results.json"
        for text, words in (("{}", "schema"), (QUALITY.read_text().replace('"kl"', '"lk"', 1), "kl is missing"), (
                '{"schema": "tierkv.bench.quality/2", "model": "m", "sizes": []}', "sizes: is empty")):
            bad.write_text(text)
            self.expect(draw(good_file, "-o", page, "--kl", bad), 3, bad, words)
        self.assertFalse(page.exists())
        self.expect(draw(good_file), 2, "--output")

    def test_where_it_is_written(self):
        _, page = self.real()
        results = self.dir / "results.json"
        page.write_text("older")
        self.expect(draw(results, "-o", page), 3, page, "exists", "--force")
        self.assertEqual(page.read_text(), "older")
        link = self.dir / "link.html"
        link.symlink_to("results.json")
        for out in (results, link):
            self.expect(draw(results, "-o", out, "--force"), 3, "the same file as the input")
        self.assertEqual(results.read_text(), Report.shared[0])
        self.expect(draw(self.dir / "missing.json", "-o", page, "--force"), 3, "missing.json: cannot be read")
        self.expect(draw(results, "-o", self.dir / "no" / "r.html"), 3, "r.html", "cannot be written")
        self.expect(draw(results, "-o", "/dev/full"), 3, "/dev/full", "No space left on device")
        link.unlink(), link.symlink_to("report.html")
        self.assertEqual(draw(results, "-o", link, "--force").returncode, 0)
        self.assertTrue(link.is_symlink() and page.read_text().startswith("<!DOCTYPE html>"))
        r = draw(results, "-o", "/dev/stdout")
        self.assertTrue(r.returncode == 0 and r.stdout.endswith("</html>\n"), r.stderr)
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/full").st_mode))

    def render(self, page):
        """What the probe found in the page as the browser laid it out; nothing where there is no browser."""
        if BROWSER is None:
            return None
        probed = page.with_name("probed.html")
        probed.write_text(page.read_text().replace("<body>", PROBE + "<body>", 1))
        dom, console = browse(probed, self.dir, "--dump-dom")
        self.assertEqual(console, [])
        title = html.unescape(re.search(r"<title>(\{.*?\})</title>", dom).group(1))
        found = json.loads(title)
        self.assertEqual(found["bad"], [], f"seed {self.seed}")
        return found

    @unittest.skipIf(BROWSER is None, "no browser (apt-get install chromium, or ./dev setup)")
    def test_browser_renders_it_without_errors(self):
        _, page = self.real()
        self.assertEqual(self.render(page), {"pictures": len(FIGURES), "bad": [], "sorted": True})
        _, console = browse(page, self.dir, f"--screenshot={self.dir / 'shot.png'}")
        self.assertEqual(console, [])
        self.assertGreater((self.dir / "shot.png").stat().st_size, 20_000)  # a blank page has a tenth of that
        browse(page, self.dir, "--no-pdf-header-footer", f"--print-to-pdf={self.dir / 'print.pdf'}")
        self.assertEqual((self.dir / "print.pdf").read_bytes()[:5], b"%PDF-")

    @unittest.skipIf(BROWSER is None, "no browser (apt-get install chromium, or ./dev setup)")
    def test_the_browser_would_notice(self):
        _, page = self.real()
        good = page.read_text()
        for old, new in (('d="M', 'd="Q'), ("translate(", "translate(9"), ("document.querySelectorAll('table.sort')", "nothing()")):
            page.write_text(good.replace(old, new))
            with self.assertRaises(AssertionError, msg=old):
                self.render(page)


if __name__ == "__main__":
    main()
