"""--report: one self-contained page, well formed, complete, small, and rendered by a browser without complaint.

The browser is Debian's chromium (./dev setup installs it). Where there is none, those tests are skipped by name.
"""
import json
import os
import re
import shutil
import subprocess
import unittest
import xml.etree.ElementTree as ET

import numpy as np

from cli import SAMPLE, CliTest, Dump, main, run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SVG = "{http://www.w3.org/2000/svg}"
HTML = "{http://www.w3.org/1999/xhtml}"
FIGURES = ["Memory against attention error of every preset", "Share of tokens in each tier per layer and head",
           "Histograms of quantisation codes", "Relative error of keys and values along the sequence",
           "Distributions of significance, value norms and key norms", "Significance along one row",
           "Share of critical tokens per layer", "Share of critical tokens per layer and head"]
PRESETS = ["step", "step:k=0.6", "k4v4:window=64+rot", "diffkv", "diffkv:alpha_l=0.1,high=k8v8,low=k4v4,window=64,sinks=4", "kivi2", "kvcomp", "fp16", "zstd-fp16"]

# Run in the page: what lies outside its picture, pictures without size, and what the browser threw.
PROBE = """<script>
const bad = [];
window.addEventListener('error', e => bad.push('error: ' + e.message));
window.addEventListener('load', () => {
  const svgs = [...document.querySelectorAll('svg')];
  for (const svg of svgs) {
    const frame = svg.getBoundingClientRect(), name = svg.getAttribute('aria-label');
    if (frame.width < 200 || frame.height < 60) bad.push(name + ': ' + frame.width + ' x ' + frame.height);
    for (const e of svg.querySelectorAll('text, rect, path, polyline, polygon, line')) {
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
  for (const e of document.querySelectorAll('.scroll'))
    if (e.scrollWidth > e.clientWidth) bad.push('a table is clipped: ' + e.scrollWidth + ' of ' + e.clientWidth);
  document.title = JSON.stringify({pictures: svgs.length, bad: bad});
});
</script>"""


def browse(page, folder, *flags):
    """(stdout, what the page said on the console) of a headless browser."""
    env = dict(os.environ, HOME=str(folder))
    r = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
                        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--window-size=1200,900", *flags,
                        page.as_uri()], capture_output=True, text=True, timeout=120, env=env)
    return r.stdout, [line for line in r.stderr.splitlines() if "CONSOLE" in line]


class Report(CliTest):
    def report(self, *args, command="analyze"):
        page = self.dir / "report.html"
        r = run(command, "--force", "--report", page, *args)
        self.assertEqual(r.returncode, 0, f"seed {self.seed}: {r.stderr}")
        self.assertEqual(list(self.dir.glob("*.part")), [])
        return page

    def sample_report(self):
        return self.report(*(w for p in PRESETS for w in ("--preset", p)), SAMPLE)

    def test_has_every_figure_and_a_table(self):
        root = ET.parse(self.sample_report()).getroot()
        self.assertEqual([s.get("aria-label") for s in root.iter(SVG + "svg")], FIGURES)
        self.assertEqual({c.text for c in root.iter(HTML + "code")} - {str(SAMPLE)}, set(PRESETS))
        self.assertEqual(len(list(root.iter(HTML + "tr"))), 1 + len(PRESETS))
        tooltips = [t.text for t in root.iter(SVG + "title")]
        for p in PRESETS:
            self.assertTrue(any(f": {p} at " in t for t in tooltips), p)

    def test_numbers_are_those_of_numpy(self):
        dump = Dump(seed=self.seed, layers=2, q_heads=4, kv_heads=2, tokens=150, queries=100)
        page = self.report("--preset", "diffkv:window=10,sinks=0", "--preset", "k4v4", dump.write(self.dir / "d.h5"))
        pictures = {s.get("aria-label"): [t.text for t in s.iter(SVG + "title")] for s in ET.parse(page).getroot().iter(SVG + "svg")}
        share = lambda x: (np.searchsorted(np.cumsum(np.sort(x)[::-1]), 0.95 * x.sum() * (1 - 1e-12)) + 1) / len(x)
        want, received, tiers = [], [], [[], [], []]
        for l in range(2):
            get = lambda name: dump.data[f"/seq/a/layer/{l}/{name}"].astype(np.float64)
            for h in range(2):
                shares = []
                for i in np.arange(64) * 100 // 64:
                    seen = int(get("q_positions")[i]) + 1
                    for q in get("q")[2 * h:2 * h + 2, i]:
                        logits = get("k")[h, :seen] @ q * dump.attrs["sm_scale"]
                        shares.append(share(np.exp(logits - logits.max())))
                want.append(np.mean(shares))
                s = get("significance")[h]
                received.append(share(s * np.arange(149, -1, -1)))
                high = s[:140] >= 1 / np.arange(1, 141)
                for tier, count in zip(tiers, (high.sum(), 140 - high.sum(), 0)):
                    tier.append(count / 150)
        cells = lambda shares: [(f"layer {i // 2}, head {i % 2}", 100 * shares[i]) for h in range(2) for i in (h, h + 2)]
        for figure, values in ((FIGURES[7], cells(want) + cells(received)), (FIGURES[1], sum(map(cells, tiers), []))):
            self.assertEqual(len(pictures[figure]), len(values))
            for text, (name, percent) in zip(pictures[figure], values):
                self.assertTrue(text.startswith(name + ":"), text)
                self.assertAlmostEqual(float(text.split()[-1].rstrip("%")), percent, delta=0.06, msg=f"seed {self.seed}: {figure}")

    def test_is_self_contained_and_the_same_every_time(self):
        text = self.sample_report().read_text()
        for reference in (r"<script", r"\bsrc=", r"\bhref=", r"url\(", r"@import", r"<link", r"https?://(?!www\.w3\.org/)"):
            self.assertIsNone(re.search(reference, text), reference)
        timeless = lambda t: re.sub(r"<td>[\d.]+/[\d.]+</td></tr>", "", t)  # the rates, the last column
        self.assertEqual(timeless(text), timeless(self.sample_report().read_text()))

    def test_default_sweep_is_under_3_mb(self):
        page = self.report(SAMPLE, command="sweep")
        self.assertLess(page.stat().st_size, 3_000_000)
        self.assertEqual([s.get("aria-label") for s in ET.parse(page).getroot().iter(SVG + "svg")], FIGURES)

    def test_several_dumps_share_their_figures(self):
        paths = [Dump(seed=self.seed + i, tokens=90 + 40 * i).write(self.dir / f"{i}.h5") for i in range(2)]
        page = self.report("--preset", "diffkv/k4v4:window=8", *paths, command="sweep")
        names = [s.get("aria-label") for s in ET.parse(page).getroot().iter(SVG + "svg")]
        self.assertEqual(names, [FIGURES[0]] * 2 + FIGURES)
        self.assertIn("all dumps together", page.read_text())
        other = Dump(seed=self.seed, layers=3, tokens=70).write(self.dir / "other.h5")
        page = self.report("--preset", "diffkv/k4v4:window=8", paths[0], other, command="sweep")
        names = [s.get("aria-label") for s in ET.parse(page).getroot().iter(SVG + "svg")]
        self.assertEqual(names.count(FIGURES[1]), 2)
        self.assertEqual(names.count(FIGURES[6]), 2)

    def test_what_a_dump_lacks_is_said(self):
        dump = Dump(seed=self.seed, queries=0)
        dump.data = {k: v for k, v in dump.data.items() if "significance" not in k}
        text = self.report("--preset", "k4v4", dump.write(self.dir / "bare.h5")).read_text()
        for words in ("the dump has no queries", "hold no significance", "neither q nor significance"):
            self.assertIn(words, text)
        ET.fromstring(text)

    def test_odd_shapes_and_names(self):
        for layers, heads, tokens, name in ((1, 1, 1, "one & only <b>.h5"), (40, 8, 9, "many.h5")):
            path = Dump(seed=self.seed, layers=layers, q_heads=heads, kv_heads=heads, tokens=tokens, head_dim=64).write(self.dir / name)
            page = self.report("--preset", "diffkv:window=0", "--preset", "fp16", "--preset", "k1v1", path)
            ET.parse(page)
            self.assertNotIn("nan", page.read_text())
            self.assertNotIn("inf<", page.read_text())
            self.render(page)

    def test_cannot_be_written(self):
        r = run("analyze", "--preset", "k8v8", "--report", self.dir / "no" / "r.html", SAMPLE)
        self.expect(r, 3, "r.html", "cannot be written")

    def render(self, page):
        """What the probe found in the page as the browser laid it out; nothing where there is no browser."""
        if BROWSER is None:
            return None
        probed = page.with_name("probed.html")
        probed.write_text(page.read_text().replace("</head>", PROBE + "</head>", 1))
        html, console = browse(probed, self.dir, "--dump-dom")
        self.assertEqual(console, [])
        title = re.search(r"<title>(.*?)</title>", html).group(1)
        found = json.loads(title.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        self.assertEqual(found["bad"], [], f"seed {self.seed}")
        return found

    @unittest.skipIf(BROWSER is None, "no browser (apt-get install chromium, or ./dev setup)")
    def test_browser_renders_it_without_errors(self):
        page = self.sample_report()
        self.assertEqual(self.render(page)["pictures"], len(FIGURES))
        _, console = browse(page, self.dir, f"--screenshot={self.dir / 'shot.png'}")
        self.assertEqual(console, [])
        self.assertGreater((self.dir / "shot.png").stat().st_size, 20_000)  # a blank page has a tenth of that
        browse(page, self.dir, "--no-pdf-header-footer", f"--print-to-pdf={self.dir / 'print.pdf'}")
        self.assertEqual((self.dir / "print.pdf").read_bytes()[:5], b"%PDF-")

    @unittest.skipIf(BROWSER is None, "no browser (apt-get install chromium, or ./dev setup)")
    def test_the_browser_would_notice(self):
        page = self.sample_report()
        broken = self.dir / "broken.html"
        broken.write_text(page.read_text().replace('<path d="M', '<path d="Q', 1))
        _, console = browse(broken, self.dir, "--dump-dom")
        self.assertEqual(len(console), 1)
        broken.write_text(page.read_text().replace('<text x="', '<text x="9', 1))
        with self.assertRaises(AssertionError):
            self.render(broken)


if __name__ == "__main__":
    main()
