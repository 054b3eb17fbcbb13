"""`diloco simulate --bandwidth`: arguments to study, study to text or JSON."""

import argparse
from collections.abc import Sequence

from diloco import arguments, errors
from diloco.planning.bandwidth import decoupled, methods, study, text
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
  codecs = f"one of {', '.join(workload_lib.CODEC_BITS)}"
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
  add("--sites", type=whole(2), help="2, or as many as --links")
  add("--method", help=f"one of {', '.join(_METHODS)}")
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
  add("--codec", default=base.codec, help=f"of what is reduced; {codecs}")
  add("--down_codec", default="f32", help="of new versions, decoupled only")
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
  arguments.answer(args, result, text.render(result))
  return 0


def _request(args: argparse.Namespace) -> study.Request:
  names = (args.method,) if args.method else _METHODS
  if names[0] not in _METHODS:
    raise errors.UserError(
      f"--method={args.method}",
      "there is no such method",
      f"choose one of {', '.join(_METHODS)}",
    )
  sites = args.sites or max(2, len(args.links or ()), len(args.latency_ms))
  latencies = _per_site("latency_ms", args.latency_ms, sites)
  work = workload_lib.check(
    workload_lib.Workload(
      params=args.params,
      layers=args.layers,
      step_secs=args.step_secs,
      every=args.every,
      fragment_layers=args.fragment_layers,
      sites=sites,
      codec=args.codec,
      latency_secs=1e-3 * max(latencies),
    )
  )
  links = _per_site("links", args.links, sites) if args.links else ()
  return study.Request(
    work=work,
    names=tuple(n for n in names if n in methods.METHODS),
    links_gbps=links,
    latencies_secs=tuple(1e-3 * ms for ms in latencies),
    sync=_sync(args) if _DECOUPLED in names else None,
    syncer_site=_syncer_site(args.syncer_site, sites),
  )


def _sync(args: argparse.Namespace) -> decoupled.Sync:
  if args.num_fragments > args.every and args.method == _DECOUPLED:
    raise errors.UserError(
      f"--num_fragments={args.num_fragments}",
      f"P must not exceed H, --every={args.every}",
      f"give at most {args.every}",
    )
  return decoupled.Sync(
    params=args.params,
    every=args.every,
    num_fragments=min(args.num_fragments, args.every),
    overlap_steps=args.overlap_steps,
    up_bits=workload_lib.codec_bits(args.codec),
    down_bits=workload_lib.codec_bits(args.down_codec),
  )


def _syncer_site(site: int | None, sites: int) -> int | None:
  if site is not None and site >= sites:
    raise errors.UserError(
      f"--syncer_site={site}",
      f"there are {sites} sites, numbered from 0",
      f"give at most {sites - 1}",
    )
  return site


def _per_site(
  name: str, values: Sequence[float], sites: int
) -> tuple[float, ...]:
  if len(values) not in (1, sites):
    raise errors.UserError(
      f"--{name}={','.join(f'{v:g}' for v in values)}",
      f"{len(values)} values for --sites={sites}",
      "give one for all sites or one for each",
    )
  return tuple(values) if len(values) == sites else tuple(values) * sites
