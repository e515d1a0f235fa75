"""Features on Ray workers: named by a setting, or of an installed package; every process loads them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from kimi_ray import Runtime
from kimi_ray.actors import down
from kimi_ray.config import RuntimeConfig
from tests.actors.test_user_code import ROOT

SAMPLE = "tests.unit.scopes.sample_features"
MODEL = f"scripted:{SAMPLE}:model"


async def test_a_feature_that_a_setting_names_works_on_the_workers(
    config: RuntimeConfig, local_ray: str, tmp_path: Path
) -> None:
    settings = config.model_copy(update={"features": (f"{SAMPLE}:Weather",)})
    async with Runtime.connect(config=settings) as runtime:
        try:
            session = await runtime.workspace(tmp_path).create_session(profile="weatherman", model=MODEL)
            assert (await (await session.main.submit("Kyoto?")).result(60)).text == "Kyoto: rain"
            report = await session.swarm("How is {{item}}?", ["a", "b"], profile="weatherman", model=MODEL)
            assert [row.status for row in report.rows] == ["completed"] * 2
            told = [found.event.data async for found in session.events(types=["weather/asked"])]
            assert told == [{"place": "Kyoto"}] * 3
        finally:
            await session.close()
    await asyncio.to_thread(down, settings.model_copy(update={"address": local_ray}))


DRIVER = """
import asyncio, json, sys
from kimi_ray import Runtime

async def main():
    async with Runtime.connect(config=json.loads(sys.argv[1])) as runtime:
        assert [feature.name for feature in runtime.features].count("weather") == 1
        session = await runtime.workspace(sys.argv[2]).create_session(profile="weatherman", model=sys.argv[3])
        print(json.dumps((await (await session.main.submit("Kyoto?")).result(60)).text))

asyncio.run(main())
"""


async def test_a_feature_of_an_installed_package_works_on_the_workers(
    config: RuntimeConfig, local_ray: str, tmp_path: Path
) -> None:
    installed = tmp_path / "site"
    info = installed / "weather_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weather-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kimi_ray.features]\nweather = {SAMPLE}:Weather\n")
    said: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True) | {"address": local_ray}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, json.dumps(said), str(tmp_path), MODEL,
        cwd=installed,  # workers have it in their path
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])},
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), 90)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    assert json.loads(out.splitlines()[-1]) == "Kyoto: rain"
    await asyncio.to_thread(down, config.model_copy(update={"address": local_ray}))
