"""A stand-in for the nvidia-smi program, over the GPUs and processes of the fake NVML (nvml.c describes the files).

It answers --query-gpu and --query-compute-apps (format csv,noheader,nounits) and -L. ``$FAKE_GPU_DIR/smi`` makes it
misbehave, key=value, one a line:
    before=TEXT  after=TEXT     extra lines around the answer ("\\n" separates)
    version_lacks=a,b           fields that this version does not know
    hang=gpu|compute-apps       that query never ends; its pid is written to $FAKE_GPU_DIR/hung
    fail=gpu|compute-apps|all   that query ends with this status:  status=N (default 1), and says:  says=TEXT
    FIELD=TEXT                  that field reads TEXT on every row (e.g. pid=[N/A], memory.used=[N/A])
    mig_rows=instance           processes of MIG instances are listed by the instance's UUID instead of its GPU's
    units=1                     units are shown in spite of nounits
"""

import os
import signal
import sys

ROOT = os.environ["FAKE_GPU_DIR"]


def pairs(name, split):
    try:
        with open(os.path.join(ROOT, name)) as file:
            return [dict(p.split("=", 1) for p in split(line) if "=" in p) for line in file if not line.startswith("#")]
    except FileNotFoundError:
        return []


QUIRKS = {}
for line in pairs("smi", lambda line: [line.rstrip("\n")]):
    QUIRKS.update(line)
GPUS = [gpu for gpu in pairs("gpus", str.split) if "uuid" in gpu]
GPUS.sort(key=lambda gpu: gpu.get("bus", ""))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes(uuid):
    try:
        names = sorted(os.listdir(os.path.join(ROOT, "procs", uuid)))
    except FileNotFoundError:
        return
    for name in names:
        pid, _, kind = name.partition(".")
        if pid.isdigit() and (kind == "static" or (kind == "" and alive(pid))):
            with open(os.path.join(ROOT, "procs", uuid, name)) as file:
                yield pid, file.read().strip()


def mib(text):
    return str(int(text) >> 20) + (" MiB" if QUIRKS.get("units") else "")


def gpu_fields(index, gpu):
    total = int(gpu.get("mem", 80 << 30))
    used = int(gpu.get("used", 0)) + sum(int(memory or 0) for _, memory in processes(gpu["uuid"]))
    return {
        "index": str(index),
        "uuid": gpu["uuid"],
        "name": gpu.get("name", "Fake_GPU").replace("_", " "),
        "pci.bus_id": gpu.get("bus", "").upper(),
        "memory.total": mib(total),
        "memory.used": mib(used),
        "memory.free": mib(total - used),
        "utilization.gpu": "[N/A]" if gpu.get("util") == "NA" else gpu.get("util", "0"),
        "compute_mode": ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")[int(gpu.get("mode", 0))],
        "display_active": "Enabled" if gpu.get("display") == "1" else "Disabled",
        "mig.mode.current": {"1": "Enabled", "0": "Disabled"}.get(gpu.get("mig", ""), "[N/A]"),
        "driver_version": "550.54.15",
    }


def command_name(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().split("\0")[0]
    except OSError:
        return "[Not Found]"


def app_rows():
    for gpu in GPUS:
        for uuid in [gpu["uuid"], *filter(None, gpu.get("instances", "").split(","))]:
            shown = uuid if QUIRKS.get("mig_rows") == "instance" else gpu["uuid"]
            for pid, memory in processes(uuid):
                used = mib(memory) if memory else "[N/A]"
                yield {"gpu_uuid": shown, "pid": pid, "used_memory": used, "process_name": command_name(pid)}


def answer(kind, fields, rows):
    lacking = [field for field in fields if field in QUIRKS.get("version_lacks", "").split(",")]
    if lacking:
        print(f'Field "{lacking[0]}" is not a valid field to query.\n')
        return 2
    if QUIRKS.get("hang") == kind:
        with open(os.path.join(ROOT, "hung"), "w") as file:
            file.write(str(os.getpid()))
        signal.pause()
    if QUIRKS.get("fail") in (kind, "all"):
        print(QUIRKS.get("says", "Unknown Error").replace("\\n", "\n"))
        return int(QUIRKS.get("status", "1"))
    lines = [QUIRKS["before"].replace("\\n", "\n")] if "before" in QUIRKS else []
    lines += [", ".join(QUIRKS.get(field, row[field]) for field in fields) for row in rows]
    lines += [QUIRKS["after"].replace("\\n", "\n")] if "after" in QUIRKS else []
    print("\n".join(lines))
    return 0


def main():
    if os.environ.get("LC_ALL") != "C":
        print("Die Ausgabe ist nicht in der Sprache, die erwartet wird")
        return 1
    for argument in sys.argv[1:]:
        option, _, fields = argument.partition("=")
        if option == "--query-gpu":
            if not GPUS and "fail" not in QUIRKS:
                print("No devices were found")
                return 6
            rows = [gpu_fields(index, gpu) for index, gpu in enumerate(GPUS) if gpu.get("lost", "0") == "0"]
            code = answer("gpu", fields.split(","), rows)
            for gpu in GPUS:
                if gpu.get("lost", "0") != "0":
                    print(
                        f"Unable to determine the device handle for GPU {gpu['bus']}: GPU is lost.  Reboot the system"
                    )
                    code = 15
            return code
        if option == "--query-compute-apps":
            return answer("compute-apps", fields.split(","), list(app_rows()))
        if option == "-L":
            for index, gpu in enumerate(GPUS):
                print(f"GPU {index}: {gpu.get('name', 'Fake_GPU').replace('_', ' ')} (UUID: {gpu['uuid']})")
                for slot, uuid in enumerate(gpu.get("instances", "").split(",")):
                    if uuid:
                        print(f"  MIG 1g.10gb     Device {slot:2}: (UUID: {uuid})")
            return 0
    return 1


sys.exit(main())
