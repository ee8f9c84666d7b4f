"""A vLLM server without vLLM: the HTTP protocol over a toy tensor-parallel model and the in-process fabric.

The plans are made as the plugin makes them (its tracer and its planning, on a toy ``load_weights``), so that what
arrives can be compared with the same loader run on real tensors.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import torch
from torch import Tensor

from vllm_nixl_plugin import errors
from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.checksums import checksums, written
from vllm_nixl_plugin.encoding import decode_landed, encode_plan, encode_plans, plan_digest
from vllm_nixl_plugin.fabric import Fabric, Region
from vllm_nixl_plugin.memory_fabric import MemoryFabric, MemoryNetwork
from vllm_nixl_plugin.planning import TracedDestination, make_plan
from vllm_nixl_plugin.tracing import Tracer
from vllm_nixl_plugin.wire import (
    PREFIX,
    BeginRequest,
    Binding,
    BoundWorker,
    CommitRequest,
    Manifest,
    PlannedWorker,
    ServerStatus,
    SumsRequest,
    UpdateOpened,
    UpdateStatus,
    WorkerPlan,
)

TOKEN = "a-token-for-tests"


def model(seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 64) -> dict[str, Tensor]:
    """A toy checkpoint: fused and split projections, a norm, a table that the server keeps in another dtype."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "embed": make(4 * width, width), "norm": make(width), "q": make(width, width), "k": make(width // 2, width),
        "down": make(width, 2 * width), "scale": make(width).abs(),
    }  # fmt: skip


TIMINGS = {"wait_s": 0.04, "pause_s": 0.01, "install_s": 0.02, "resume_s": 0.03}


class Worker:
    """One rank: its parameters, the loader, and its memory."""

    def __init__(self, rank: int, size: int, make_agent: Callable[[str], Fabric], width: int = 64) -> None:
        self.rank, self.size = rank, size
        self.incarnation = uuid.uuid4().hex
        self.agent = make_agent(f"vllm-{rank}-{self.incarnation}")
        qk = (width + width // 2) // size
        self.params = {
            "embed": torch.zeros(4 * width // size, width), "norm": torch.zeros(width), "qk": torch.zeros(qk, width),
            "down": torch.zeros(width, 2 * width // size), "scale": torch.zeros(width),
        }  # fmt: skip
        self.shadow = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.agent.register([Region.of(t) for t in (*self.params.values(), *self.shadow.values())])
        self.arrived: dict[str, set[tuple[str, int, int]]] = {}
        self.planned: WorkerPlan

    def load_weights(self, params: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        used = set()
        for name, w in weights:
            rows = w.shape[0] // self.size
            if name in ("q", "k"):
                begin = 0 if name == "q" else params["qk"].shape[0] - rows
                params["qk"][begin : begin + rows].copy_(w[self.rank * rows : (self.rank + 1) * rows])
            elif name == "embed":
                params["embed"].copy_(w.chunk(self.size)[self.rank])
            elif name == "down":
                params["down"].copy_(w.chunk(self.size, dim=1)[self.rank])
            elif name == "scale":
                params["scale"].copy_(-(w * 0.5))
            elif name == "norm":
                params["norm"].copy_(w)
            else:
                continue
            used.add(name)
        return used

    def plan(self, manifest: Manifest) -> WorkerPlan:
        tracer = Tracer()
        weights = {w.name: tracer.source(w.name, w.shape, getattr(torch, w.dtype)) for w in manifest.weights}
        twins = tracer.stand_ins(self.params)
        with tracer:
            self.load_weights(twins, weights.items())
        traced = [
            TracedDestination(i, (name,), p.untyped_storage().nbytes(), True, tuple(tracer.pieces(twins[name])))
            for i, (name, p) in enumerate(self.params.items())
        ]
        missing = {"embed", "norm", "q", "k", "down", "scale"} - {w.name for w in manifest.weights}
        if missing and not manifest.partial:
            raise errors.PlanRefused(f"weights are missing: {sorted(missing)}", missing=sorted(missing))
        return make_plan(manifest, traced, None, ()).plan

    def binding(self, plan: WorkerPlan, mode: str) -> Binding:
        memory = self.shadow if mode == "shadow" else self.params
        for name, tensor in self.shadow.items():
            tensor.copy_(self.params[name])
        return Binding(
            worker=self.rank, incarnation=self.incarnation, agent=self.agent.name, agent_metadata=self.agent.metadata(),
            memory="DRAM", device_id=0, addresses=tuple(memory[d.names[0]].data_ptr() for d in plan.destinations),
        )  # fmt: skip

    def arrived_nbytes(self, update_id: str, patience_s: float) -> int:
        """What has come of an update; a message may come a moment after its sender has moved on to the commit."""
        deadline = time.monotonic() + patience_s
        while True:
            for sender, message in self.agent.notifications():
                landed = decode_landed(message)
                self.arrived.setdefault(landed.update_id, set()).add((sender, landed.sequence, landed.nbytes))
            got = sum(nbytes for _, _, nbytes in self.arrived.get(update_id, ()))
            if got >= self.planned.nbytes or time.monotonic() >= deadline:
                return got
            time.sleep(0.001)


class FakeServer:
    """Answers as docs/protocol.md says. ``fail[(method, path)]``: errors to answer with, each once."""

    def __init__(self, make_agent: Callable[[str], Fabric], url: str = "http://fake", size: int = 2) -> None:
        self.url, self.make_agent, self.size = url, make_agent, size
        self.version = "default"
        self.plans: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.aborts: list[bool] = []
        self.renewals = 0
        self.known: list[int] = []
        self.fail: dict[tuple[str, str], list[Exception]] = {}
        self.before_commit: Callable[[], None] = lambda: None
        self.before_verify: Callable[[], None] = lambda: None
        self.lose_answers = 0
        self.patience_s = 0.0
        self.updates: dict[str, UpdateStatus] = {}
        self.open: tuple[UpdateOpened, BeginRequest] | None = None
        self.restart()

    def restart(self) -> None:
        self.workers = [Worker(rank, self.size, self.make_agent) for rank in range(self.size)]
        self.plans = {}
        self.open = None

    def expect(self, weights: dict[str, Tensor]) -> None:
        """The parameters of every worker are what its loader makes of these weights."""
        for worker in self.workers:
            params = {name: torch.zeros_like(p) for name, p in worker.params.items()}
            worker.load_weights(params, weights.items())
            for name, expected in params.items():
                assert torch.equal(worker.params[name], expected), f"{name} of rank {worker.rank}"

    def __call__(self, request: httpx.Request) -> httpx.Response:
        method, path = request.method, request.url.path.removeprefix(PREFIX)
        parts = path.strip("/").split("/")
        kind = "/" + "/".join("{id}" if len(p) == 32 else p for p in parts)
        self.requests.append((method, kind))
        try:
            if queue := self.fail.get((method, kind)):
                raise queue.pop(0)
            if request.headers.get("authorization") != f"Bearer {TOKEN}":
                raise errors.Unauthorized("the bearer token is missing or wrong")
            return self._answer(method, kind, parts, request)
        except errors.PushWeightsError as error:
            return httpx.Response(error.http_status, json=error.to_wire())

    def _answer(self, method: str, kind: str, parts: list[str], request: httpx.Request) -> httpx.Response:
        if (method, kind) == ("GET", "/status"):
            return self._json(
                ServerStatus(
                    plugin="0", state="serving", ready=True, reason="", torn=False, held=False, epoch=0,
                    weight_version=self.version, incarnation="i", workers=tuple(range(self.size)),
                )
            )  # fmt: skip
        if (method, kind) == ("POST", "/plan"):
            return self._plan(Manifest.model_validate_json(request.content))
        if (method, kind) == ("POST", "/updates"):
            answer = self._begin(BeginRequest.model_validate_json(request.content))
            if self.lose_answers:
                self.lose_answers -= 1
                raise httpx.ReadError("reset", request=request)
            return answer
        if (method, kind) in (("POST", "/pause"), ("POST", "/resume")):
            return httpx.Response(200, json={})
        update_id = parts[1]
        if (method, kind) == ("POST", "/updates/{id}/renew"):
            assert json.loads(request.content)["lease_s"] > 0
            self.renewals += 1
            return httpx.Response(200, json={"update_id": update_id})
        if (method, kind) == ("POST", "/updates/{id}/commit"):
            return self._json(self._commit(update_id, CommitRequest.model_validate_json(request.content)), 202)
        if (method, kind) == ("POST", "/updates/{id}/verify"):
            return self._verify(SumsRequest.model_validate_json(request.content))
        if (method, kind) == ("DELETE", "/updates/{id}"):
            self.aborts.append(request.url.params["drained"] == "true")
            self.open = None
            self.updates[update_id] = self.updates[update_id].model_copy(update={"state": "aborted"})
        return self._json(self.updates[update_id])

    def _plan(self, manifest: Manifest) -> httpx.Response:
        planned, blobs = [], {}
        for worker in self.workers:
            plan = worker.plan(manifest)
            blobs[plan_digest(plan)] = encode_plan(plan)
            planned.append(PlannedWorker(worker=worker.rank, plan=plan_digest(plan), incarnation=worker.incarnation))
            self.plans[plan_digest(plan)] = blobs[plan_digest(plan)]
            worker.planned = plan
        return httpx.Response(200, content=encode_plans(tuple(planned), blobs))

    def _begin(self, request: BeginRequest) -> httpx.Response:
        if self.open is not None:
            opened, other = self.open
            raise errors.LeaseHeld("busy", holder=other.holder, expires_in_s=1.0, update_id=opened.update_id)
        if any(plan not in self.plans for plan in request.plans):
            raise errors.UnknownPlan("plan again")
        bound = []
        for worker in self.workers:
            binding = worker.binding(worker.planned, request.mode)
            digest = binding.digest()
            known = digest in request.known_bindings
            bound.append(BoundWorker(worker=worker.rank, incarnation=worker.incarnation, digest=digest,
                                     binding=None if known else binding))  # fmt: skip
        self.known.append(sum(b.binding is None for b in bound))
        opened = UpdateOpened(update_id=uuid.uuid4().hex, epoch=1, version=request.version, mode=request.mode,
                              lease_s=request.lease_s, workers=tuple(bound))  # fmt: skip
        self.open = opened, request
        status = UpdateStatus(update_id=opened.update_id, version=request.version, mode=request.mode, state="open")
        self.updates[opened.update_id] = status
        return self._json(opened)

    def _verify(self, request: SumsRequest) -> httpx.Response:
        assert self.open is not None
        self.before_verify()
        differing = {}
        for worker, sums in zip(self.workers, request.sums, strict=True):
            memory = worker.shadow if self.open[1].mode == "shadow" else worker.params
            names = [d.names[0] for d in worker.planned.destinations]
            for i, (name, told) in enumerate(zip(names, sums, strict=True)):
                copies = [c.copy_ for c in worker.planned.copies if c.destination == i]
                found = checksums([(written(memory[name].view(-1).view(torch.uint8), copies), 0)])
                if found != told:
                    differing.setdefault(str(worker.rank), []).append(name)
        if differing:
            raise errors.Corrupted(f"not what was sent: {differing}", differing=differing)
        return httpx.Response(200, json={})

    def _commit(self, update_id: str, request: CommitRequest) -> UpdateStatus:
        self.before_commit()
        if self.open is None or self.open[0].update_id != update_id:
            raise errors.StaleUpdate("the update is over")
        state, error = "done", None
        for worker in self.workers:
            got = worker.arrived_nbytes(update_id, self.patience_s)
            if got != worker.planned.nbytes:
                state = "failed"
                error = errors.Incomplete(f"worker {worker.rank} has {got} bytes").to_wire()["error"]
        opened, begun = self.open
        self.open = None
        if state == "done":
            for worker in self.workers:
                for name, tensor in worker.params.items():
                    if begun.mode == "shadow":
                        tensor.copy_(worker.shadow[name])
            self.version = opened.version
        self.updates[update_id] = self.updates[update_id].model_copy(
            update={"state": state, "error": error, "timings": TIMINGS}
        )
        return self.updates[update_id].model_copy(update={"state": "committing"})

    @staticmethod
    def _json(record: ServerStatus | UpdateStatus | UpdateOpened, status: int = 200) -> httpx.Response:
        return httpx.Response(status, content=record.model_dump_json(), headers={"content-type": "application/json"})


class Servers:
    """Some fake servers behind one transport, and the network that the trainer's agents join."""

    def __init__(self, count: int = 1, size: int = 2) -> None:
        self.network = MemoryNetwork()
        self.all = [FakeServer(self._member, f"http://fake-{i}", size) for i in range(count)]
        self.agents: list[MemoryFabric] = []
        self.down: set[str] = set()
        self.transport = httpx.MockTransport(self._route)

    def _member(self, name: str) -> MemoryFabric:
        return MemoryFabric(name, self.network)

    def fabric(self, name: str) -> MemoryFabric:
        """The trainer's agent."""
        self.agents.append(self._member(name))
        return self.agents[-1]

    def _route(self, request: httpx.Request) -> httpx.Response:
        url = f"{request.url.scheme}://{request.url.host}"
        if url in self.down:
            raise httpx.ConnectError("refused", request=request)
        return next(server for server in self.all if server.url == url)(request)


@contextmanager
def listening(server: FakeServer) -> Iterator[str]:
    """The server on a port of this host, while entered; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            request = httpx.Request(self.command, f"http://fake{self.path}", headers=dict(self.headers), content=body)
            response = server(request)
            self.send_response(response.status_code)
            self.send_header("content-length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


@contextmanager
def reachable() -> Iterator[FakeServer]:
    """A server that other processes can push to, while entered: over NIXL, at its ``url``."""
    made = FakeServer(NixlAgent)
    made.patience_s = 10.0
    with listening(made) as url:
        made.url = url
        yield made
    for worker in made.workers:
        worker.agent.close()
