"""Asks a rendezvous store again and again, in its ways, and says each time when it has answered.

Usage: asks_the_store.py ENDPOINT FOLDER

A file of the folder has as many lines as answers: ``lasting`` of a client's own connection, ``group`` of one
as process groups have, ``waiter`` of a wait for a key that the file ``go`` lets this process set.
"""

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.incarnations import begin, has_begun
from swift_ft.coordination.store_client import connect

address, folder = StoreAddress.parse(sys.argv[1]), Path(sys.argv[2])
begin(connect(address, "run"))
store = connect(address, "run", admit=has_begun)


def say(name: str) -> None:
    with (folder / name).open("a") as file:
        file.write("answered\n")


def ask_as_a_group() -> None:
    connection = store.connection()
    while True:
        connection.check(["key"])
        say("group")
        time.sleep(0.05)


def wait() -> None:
    store.wait(["awaited"], timedelta(seconds=100))
    say("waiter")


for target in (ask_as_a_group, wait):
    threading.Thread(target=target, daemon=True).start()
while True:
    store.check(["key"])
    say("lasting")
    if (folder / "go").exists():
        store.set("awaited", "1")
    time.sleep(0.05)
