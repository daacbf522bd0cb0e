"""The command line. The one file that knows every stage, and it imports a stage only when its command runs."""

import os
import sys
import warnings
from importlib import import_module

COMMANDS = {
    "demo": ("policy.demo:main", "the whole pipeline on the embedded model and data, ending in report.html"),
    "data": ("segrew.data_command:main", "what a data set holds: type, counts, one rendered example"),
    "segment": ("segrew.segment_command:main", "cut responses into units and show their lengths"),
    "train-rm": ("reward_models.train:main", "train a segment reward model from preference pairs"),
    "calibrate": ("reward_models.calibrate:main", "fit the location normalizer of a reward model"),
    "rewardbench": ("reward_models.rewardbench:main", "benchmark a reward model on files of pairs"),
    "score": ("reward_models.score:main", "score prompts and responses, segment by segment"),
    "show": ("reward_models.score:show", "print responses coloured by segment reward"),
    "ppo": ("policy.ppo:main", "dense-reward PPO with any reward and action granularity"),
    "rloo": ("policy.rloo:main", "the same loop without a critic: one action, several answers to a prompt"),
    "probe": ("policy.probe:main", "which action granularity has the quietest gradient, from one set of rollouts"),
    "generate": ("policy.generate:main", "answers of a policy in AlpacaEval's, Arena-Hard's or MT-Bench's format"),
    "judge": ("policy.judge:main", "two answer files before a judge behind an OpenAI-compatible endpoint"),
    "doctor": ("policy.doctor:main", "check a model, a reward model and this machine before a run"),
    "cache": ("segrew.cache_command:main", "list or clear the entropies and states kept of frozen models"),
    "report": ("reward_models.report:main", "one self-contained HTML page from run directories"),
}

# Those that divide their rows over processes; the others run in one.
DIVIDED = ("train-rm", "calibrate", "rewardbench", "score", "show", "ppo", "rloo", "probe", "generate")


def _usage() -> str:
    lines = ["usage: segrew COMMAND [--config FILE.yaml] [--name value ...]", "", "commands:"]
    lines += [f"  {name:12} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "`segrew COMMAND --help` lists the settings of a command."])


def _quiet_libraries() -> None:
    """Keep progress bars of loading and notices meant for library authors off the terminal."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    first = os.environ.get("RANK", "0") == "0"  # of several processes, which mostly warn of the same
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr) if first else None
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a user's error, which prints one message."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f" (there are: {', '.join(COMMANDS)})"
        print(f"segrew: no command '{argv[0]}'{hint}", file=sys.stderr)
        return 2
    if os.environ.get("WORLD_SIZE", "1") != "1" and argv[0] not in DIVIDED:
        print(
            f"segrew {argv[0]}: error: runs in one process; start it without `accelerate launch` or `torchrun` "
            f"(several can share {', '.join(DIVIDED)}).",
            file=sys.stderr,
        )
        return 2
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    try:
        command = getattr(import_module(module), function)
        _quiet_libraries()
        return command(argv[1:]) or 0
    except (ValueError, OSError) as error:
        if os.environ.get("SEGREW_TRACEBACK"):
            raise
        print(f"segrew {argv[0]}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nsegrew {argv[0]}: interrupted. {stop}".rstrip(), file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
