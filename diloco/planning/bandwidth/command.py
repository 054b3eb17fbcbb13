"""`diloco simulate --bandwidth`: arguments to study, study to text or JSON."""

import argparse
from collections.abc import Sequence

from diloco import arguments, errors
from diloco.planning.bandwidth import decoupled, methods, study
from diloco.planning.bandwidth import workload as workload_lib

_DECOUPLED = "decoupled"
_METHODS = (*methods.METHODS, _DECOUPLED)
_DESCRIPTION = (
  "Compute utilisation against the bandwidth of the links between sites."
)
_EXAMPLES = (
  "diloco simulate --bandwidth --params=1e9 --layers=24 --step_secs=0.1",
  "diloco simulate --bandwidth --method=decoupled --links=2,5 --codec=bf16",
)


def parser() -> arguments.Parser:
  """The arguments."""
  made = arguments.Parser(
    "diloco simulate --bandwidth", _DESCRIPTION, _EXAMPLES
  )
  add, number, whole = made.add_argument, arguments.number, arguments.whole
  base = workload_lib.Workload()
  sync = decoupled.Sync(base.params)
  codecs = tuple(workload_lib.CODEC_BITS)
  add("--bandwidth", action="store_true", help=argparse.SUPPRESS)
  add("--params", type=number(1), default=base.params, help="of the model")
  add("--layers", type=whole(1), default=base.layers, help="of the model")
  add(
    "--step_secs",
    type=number(0, above=True),
    default=base.step_secs,
    help="pure computing of one inner step",
  )
  add("--every", type=whole(1), default=base.every, help="H")
  add(
    "--fragment_layers",
    type=whole(1),
    default=base.fragment_layers,
    help="layers of a fragment, of the streaming methods",
  )
  add("--sites", type=whole(2, 10_000), help="2, or as many as --links")
  add("--method", choices=_METHODS, help="this one alone")
  add(
    "--links",
    type=arguments.numbers(0, above=True),
    help="Gbit/s of each site's link, with commas, or one for all",
  )
  add(
    "--latency_ms",
    type=arguments.numbers(0),
    default=(0.0,),
    help="one way, of each site's link, with commas, or one for all",
  )
  add("--codec", choices=codecs, default=base.codec, help="of what is reduced")
  add(
    "--down_codec",
    choices=codecs,
    default="f32",
    help="of new versions, decoupled only",
  )
  add(
    "--num_fragments",
    type=whole(1),
    default=sync.num_fragments,
    help="P, decoupled only",
  )
  add(
    "--overlap_steps",
    type=whole(1),
    default=sync.overlap_steps,
    help="tau, decoupled only",
  )
  add(
    "--syncer_site",
    type=whole(0),
    help="site, from 0, whose link all others meet at; else a place of its own"
    " with bandwidth enough; decoupled only",
  )
  return made


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  args = parser().parse_args(list(argv))
  result = study.run(_request(args))
  arguments.answer(args, result, study.text(result))
  return 0


def _request(args: argparse.Namespace) -> study.Request:
  names = (args.method,) if args.method else _METHODS
  sites = args.sites or max(2, len(args.links or ()), len(args.latency_ms))
  latencies = _per_site("latency_ms", args.latency_ms, sites)
  errors.require(
    args.fragment_layers <= args.layers,
    f"--fragment_layers={args.fragment_layers}",
    f"the model has --layers={args.layers}",
    "give a fragment at most that many layers",
  )
  errors.require(
    args.syncer_site is None or args.syncer_site < sites,
    f"--syncer_site={args.syncer_site}",
    f"there are {sites} sites, numbered from 0",
    f"give at most {sites - 1}",
  )
  errors.require(
    args.syncer_site is None
    or (_DECOUPLED in names and args.links is not None),
    f"--syncer_site={args.syncer_site}",
    "it says whose link decoupled islands meet at, and would be ignored",
    "give --links and leave --method out, or leave it out",
  )
  errors.require(
    args.method != _DECOUPLED or args.num_fragments <= args.every,
    f"--num_fragments={args.num_fragments}",
    f"P must not exceed H, --every={args.every}",
    f"give at most {args.every}",
  )
  links = _per_site("links", args.links, sites) if args.links else ()
  return study.Request(
    work=workload_lib.Workload(
      params=args.params,
      layers=args.layers,
      step_secs=args.step_secs,
      every=args.every,
      fragment_layers=args.fragment_layers,
      sites=sites,
      codec=args.codec,
      latency_secs=1e-3 * max(latencies),
    ),
    names=tuple(n for n in names if n in methods.METHODS),
    links_gbps=links,
    latencies_secs=tuple(1e-3 * ms for ms in latencies),
    sync=decoupled.Sync(
      params=args.params,
      every=args.every,
      num_fragments=min(args.num_fragments, args.every),
      overlap_steps=args.overlap_steps,
      up_bits=workload_lib.CODEC_BITS[args.codec],
      down_bits=workload_lib.CODEC_BITS[args.down_codec],
    )
    if _DECOUPLED in names
    else None,
    syncer_site=args.syncer_site,
  )


def _per_site(
  name: str, values: Sequence[float], sites: int
) -> tuple[float, ...]:
  errors.require(
    len(values) in (1, sites),
    f"--{name}={','.join(f'{v:g}' for v in values)}",
    f"{len(values)} values for --sites={sites}",
    "give one for all sites or one for each",
  )
  return tuple(values) if len(values) == sites else tuple(values) * sites
