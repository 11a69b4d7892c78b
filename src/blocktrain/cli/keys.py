"""blocktrain keys: who may serve a model together."""

from pathlib import Path

import click


@click.command("keys")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--stages", type=click.IntRange(0, 10_000), default=0, help="Stages stage-1 to stage-N."
)
@click.option("--name", "names", multiple=True, help="A stage of this name; repeatable.")
@click.option("--router", "routers", multiple=True, help="A further router; repeatable.")
def command(folder: Path, stages: int, names: tuple[str, ...], routers: tuple[str, ...]) -> None:
    """Make the certificates with which a router and its stages know each other.

    The first call makes an authority and the certificate of `router`; every call adds the members
    it names, and renews those that expire within 30 days. A member's machine needs ca.pem,
    NAME.pem and NAME.key. ca.key stays here: who has it can admit anyone.
    """
    from blocktrain.serve.keys import ROUTER, STAGE, Keyring

    keyring = Keyring(folder)
    asked = [(ROUTER, name) for name in ("router", *routers)]
    asked += [(STAGE, name) for name in (*(f"stage-{i + 1}" for i in range(stages)), *names)]
    for role, name in asked:
        state = "made" if keyring.add(role, name) else "kept"
        click.echo(f"{state}  {role:6s}  {folder / name}.pem")
