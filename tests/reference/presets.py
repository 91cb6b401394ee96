# SPDX-License-Identifier: Apache-2.0
"""The grammar of presets, NAME[:key=value,...][+STAGE][+rot], as plain descriptions of what is stored."""
import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Format:
    """How one component of a token is stored."""
    rule: str = "raw"    # raw, minmax, norm, relative, absolute, weighted
    bits: int = 16       # of a min-max code, 2 of one clipped at the norm
    unit: str = "token"  # what shares a step: token, channel (over `group` tokens), block (`group` tokens x head)
    group: int = 0       # token: channels that share a step (0: the head); channel, block: tokens
    step: float = 0.0    # relative: fraction of the range; absolute, weighted: the error aimed at


RAW = Format()


@dataclass
class Scheme:
    name: str                      # as given on the command line
    high: tuple = (RAW, RAW)       # (keys, values) of a token outside the window
    low: tuple = (RAW, RAW)
    tiered: bool = False           # significance decides between high, low and pruned
    alpha_high: float = 1.0
    alpha_low: float = 0.0
    window: int = 0
    sinks: int = 0
    window_form: tuple = (RAW, RAW)
    classes: tuple = ()            # of heads, most sensitive first: rows are stored as their class says
    basis: object = "none"         # none, mean, hadamard, hadamard+mean: of both components, or (keys, values)
    huffman: bool = False
    zstd: bool = False             # one byte a code, zstd
    stage: str = "none"            # fse, fixed or bitshuffle instead of Huffman
    predict: str = "none"          # token, channel, plane: the codes are what a Lorenzo predictor leaves
    eviction: str = "none"         # snapkv, h2o: the same share of tokens in every head
    keep: float = 1.0
    importance: bool = False       # a token's step follows its significance
    pages: bool = field(default=False)  # fixed-width pages exist


@dataclass(frozen=True)
class HeadClass:
    share: float  # 0: what is left
    high: tuple
    low: tuple
    alpha_high: float = 1.0
    alpha_low: float = 0.0


def min_max(bits, group=0):
    return RAW if bits == 16 else Format("minmax", bits, "token", group)


def tier(name, group_k=0, group_v=0):
    bits = re.fullmatch(r"k(16|8|4|2n?|1)v(16|8|4|2n?|1)", name.lower())
    if not bits:
        raise ValueError(f"{name}: not a tier format")
    one = lambda text, group: Format("norm", 2, "token", group) if text == "2n" else min_max(int(text), group)
    return one(bits[1], group_k), one(bits[2], group_v)


def options_of(text, defaults):
    """key=value,... over `defaults`, each value converted to the type of its default."""
    options = dict(defaults)
    for pair in filter(None, text.split(",")):
        key, value = pair.split("=", 1)
        if key not in defaults:
            raise ValueError(f"unknown option {key}")
        options[key] = type(defaults[key])(value)
    return options


def plain(name, text):
    o = options_of(text, dict(window=64, sinks=4, group_k=0, group_v=0))
    high = (RAW, RAW) if name == "fp16" else tier(name, o["group_k"], o["group_v"])
    return dict(high=high, window=o["window"], sinks=o["sinks"], pages=True)


def diffkv(_, text):
    o = options_of(text, dict(high="k8v4", low="k4v2", alpha_h=1.0, alpha_l=0.0, window=64, sinks=4, window_format="high"))
    high, low = tier(o["high"]), tier(o["low"])
    form = {"high": high, "raw": (RAW, RAW)}[o["window_format"]]
    return dict(high=high, low=low, tiered=True, alpha_high=o["alpha_h"], alpha_low=o["alpha_l"],
                window=o["window"], sinks=o["sinks"], window_form=form, pages=True)


FAST = "0.1*k8v4|0.375*k4v4/k4v2@1|k4v2/k2v2@1"


def head_class(text):
    share, formats, alphas = re.fullmatch(r"(?:([^*]*)\*)?([^@]*)(?:@(.*))?", text).groups()
    tiers = [tier(re.sub(r"2(?!n)", "2n", f)) for f in formats.split("/")]
    return HeadClass(float(share or 0), tiers[0], tiers[-1], *map(float, (alphas or "1:0").split(":")))


def class_tiers(name, text):
    o = options_of(text, dict(classes=FAST, rotate="on", means="on", window=64, sinks=4))
    classes = tuple(head_class(c) for c in o["classes"].split("|"))
    bases = {("on", "on"): ("hadamard+mean", "hadamard"), ("on", "off"): ("hadamard", "hadamard"),
             ("off", "on"): ("mean", "none"), ("off", "off"): ("none", "none")}
    first = classes[0]
    return dict(high=first.high, low=first.low, alpha_high=first.alpha_high, alpha_low=first.alpha_low, classes=classes,
                tiered=any(has_tiers(c) for c in classes), basis=bases[o["rotate"], o["means"]], window=o["window"],
                sinks=o["sinks"], pages=True)


def has_tiers(c):
    return c.high != c.low or c.alpha_low > 0


def kivi(name, text):
    bits = int(name[4:])
    o = options_of(text, dict(group={4: 128, 2: 32}[bits], residual=64, sinks=4))
    keys = Format("minmax", bits, "channel", o["group"])
    return dict(high=(keys, min_max(bits, o["group"])), window=o["residual"], sinks=o["sinks"])


def kvcomp(_, text):
    o = options_of(text, dict(unit="block", rel_k=0.05, rel_v=0.15, block=64, window=64, sinks=4))
    keys = Format("relative", unit=o["unit"], group=o["block"], step=o["rel_k"])
    return dict(high=(keys, Format("relative", step=o["rel_v"])), window=o["window"], sinks=o["sinks"], huffman=True)


def step(_, text):
    o = options_of(text, dict(k=0.3, v=0.25, basis="mean", window=64, sinks=4))
    formats = Format("absolute", step=o["k"]), Format("absolute", step=o["v"])
    return dict(high=formats, basis=o["basis"], window=o["window"], sinks=o["sinks"], huffman=True)


def small(_, text):
    """Without a profile."""
    o = options_of(text, dict(k=0.33, v=0.28, window=64, sinks=4, books=1, importance="on"))
    formats = Format("weighted", step=o["k"]), Format("weighted", step=o["v"])
    return dict(high=formats, window=o["window"], sinks=o["sinks"], huffman=True, importance=o["importance"] == "on")


def evicting(name, text):
    o = options_of(text, dict(keep=0.5, window=64, format="k16v16"))
    high = tier(o["format"])
    return dict(high=high, eviction=name, keep=o["keep"], window=o["window"] if name == "snapkv" else 0, window_form=high, pages=True)


FAMILIES = [("snapkv|h2o", evicting), ("fp16", plain), (r"k\d+n?v\d+n?", plain), ("fast|tiers", class_tiers), ("diffkv", diffkv), ("kivi[42]", kivi), ("kvcomp", kvcomp),
            ("step", step), ("small", small)]


def take_common(text):
    """(the text without them, {only, predict})."""
    common = dict(only="", predict="none")
    rest = []
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        if key in common:
            common[key] = value
        else:
            rest.append(pair)
    return ",".join(rest), common


def parse(preset):
    body, *suffixes = preset.split("+")
    name, _, text = body.partition(":")
    if name == "zstd-codes":
        of = options_of(text, dict(of="k8v4", level=3))["of"]
        scheme = parse("+".join([of] + suffixes))
        scheme.name, scheme.zstd, scheme.huffman, scheme.pages = preset, True, False, False
        return scheme
    if name == "zstd-fp16":
        scheme = Scheme(preset, zstd=True)
    else:
        text, common = take_common(text)
        family = next((f for pattern, f in FAMILIES if re.fullmatch(pattern, name)), None)
        if family is None:
            raise ValueError(f"unknown preset {name}")
        scheme = Scheme(preset, **family(name, text))
        scheme.predict = common["predict"]
        if common["only"]:
            kept = common["only"] == "v"  # index of the component that is compressed
            for part in ("high", "low", "window_form"):
                setattr(scheme, part, tuple(f if c == kept else RAW for c, f in enumerate(getattr(scheme, part))))
    if "rot" in suffixes:
        scheme.basis = "hadamard"  # instead of the channel means
    scheme.huffman |= "huffman" in suffixes
    for stage in set(suffixes) & {"fse", "fixed", "bitshuffle"}:
        scheme.stage, scheme.huffman, scheme.pages = stage, False, False
    scheme.pages &= not scheme.huffman
    return scheme
