"""A stand-in for the nvidia-smi program, over the GPUs and processes of the fake NVML (nvml.c describes the files).

It answers -q -x (with -i ID,ID too) and what the older package asks, and appends its arguments to
``$FAKE_GPU_DIR/runs``. What root does with it changes those GPUs: ``-pm 1`` makes the driver quick, ``-r`` heals, and
``conf-compute -srs 1`` lets CUDA start. ``$FAKE_GPU_DIR/smi`` makes it misbehave, key=value, one a line:
    before=TEXT  after=TEXT     extra lines around the answer ("\\n" separates)
    version_lacks=a,b           elements that this version does not know
    hang=1                      the query never ends; its pid is written to $FAKE_GPU_DIR/hung
    fail=1                      the query ends with this status:  status=N (default 1), and says:  says=TEXT
    lost_line=TEXT              what is said of a lost GPU, with {index}, {bus} and {short} (a bus id of 4 digits)
    ELEMENT=TEXT                that element reads TEXT everywhere (e.g. pid=N/A, used=N/A, processes=N/A)
    broken=1                    the section of clocks closes its elements in the wrong order
    one_id=1                    -i takes one id only
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
        pid, *suffixes = name.split(".")
        if pid.isdigit() and ("static" in suffixes or alive(pid)):
            with open(os.path.join(ROOT, "procs", uuid, name)) as file:
                yield pid, file.read().strip(), next((one for one in suffixes if one != "static"), "")


def mib(number):
    return f"{int(number) >> 20} MiB"


def element(name, text):
    """One that may be missing, or say something else than it should."""
    if name in QUIRKS.get("version_lacks", "").split(","):
        return ""
    return f"<{name}>{QUIRKS.get(name, text)}</{name}>\n"


def memory(total, used):
    parts = (("total", mib(total)), ("reserved", "600 MiB"), ("used", mib(used)), ("free", mib(total - used)))
    return "<fb_memory_usage>" + "".join(element(*part) for part in parts) + "</fb_memory_usage>\n"


def command_name(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().split("\0")[0].replace("&", "&amp;").replace("<", "&lt;")
    except OSError:
        return "[Not Found]"


MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
ACTIONS = {"0": "None", "1": "Reset", "2": "Reboot", "3": "Drain P2P", "4": "Drain and Reset"}
REMAPS = {"": ("No", "No"), "pending": ("Yes", "No"), "failed": ("No", "Yes"), "NA": ("N/A", "N/A")}
KINDS = {"": "C", "graphics": "G", "mps": "M+C"}


def process_infos(uuids):
    for uuid in uuids:
        for pid, used, kind in processes(uuid):
            fields = ("gpu_instance_id", "N/A"), ("compute_instance_id", "N/A"), ("pid", pid), ("type", KINDS[kind])
            named = ("process_name", command_name(pid)), ("used_memory", mib(used) if used else "N/A")
            yield "<process_info>\n" + "".join(element(*field) for field in (*fields, *named)) + "</process_info>\n"


def report(gpu):
    uuids = [gpu["uuid"], *filter(None, gpu.get("instances", "").split(","))]
    used = int(gpu.get("used", 0)) + sum(int(memory or 0) for uuid in uuids for _, memory, _ in processes(uuid))
    clocks = "<supported_mem_clock><value>1 MHz</supported_mem_clock></value>" if QUIRKS.get("broken") else ""
    load = "N/A" if gpu.get("util") == "NA" else gpu.get("util", "0") + " %"
    mig = {"1": "Enabled", "0": "Disabled"}.get(gpu.get("mig", ""), "N/A")
    return "".join(
        (
            f'<gpu id="{gpu.get("bus", "").upper()}">\n',
            element("product_name", gpu.get("name", "Fake_GPU").replace("_", " ")),
            element("display_mode", "Enabled"),
            element("display_active", "Enabled" if gpu.get("display") == "1" else "Disabled"),
            f"<mig_mode>\n{element('current_mig', mig)}<pending_mig>Disabled</pending_mig>\n</mig_mode>\n",
            "<mig_devices><mig_device><uuid>MIG-x</uuid></mig_device></mig_devices>\n" if mig == "Enabled" else "",
            element("uuid", gpu["uuid"]),
            memory(int(gpu.get("mem", 80 << 30)), used),
            "<bar1_memory_usage><total>7 MiB</total><used>7 MiB</used></bar1_memory_usage>\n",
            element("compute_mode", MODES[int(gpu.get("mode", 0))]),
            f"<utilization>\n{element('gpu_util', load)}</utilization>\n",
            element("gpu_recovery_action", ACTIONS.get(gpu.get("recovery", "0"), "N/A")),
            f"<remapped_rows>\n{element('remapped_row_pending', REMAPS[gpu.get('remap', '')][0])}"
            f"{element('remapped_row_failure', REMAPS[gpu.get('remap', '')][1])}</remapped_rows>\n",
            f"<temperature>\n{element('gpu_temp', gpu.get('temp', '41') + ' C')}</temperature>\n",
            element("fan_speed", gpu["fan"] + " %" if "fan" in gpu else "N/A"),
            f"<gpu_power_readings>\n{element('power_draw', '62.90 W')}{element('current_power_limit', '400.00 W')}"
            "</gpu_power_readings>\n",
            clocks,
            element("processes", "\n" + "".join(process_infos(uuids))),
            "<accounted_processes></accounted_processes>\n</gpu>\n\n",
        )
    )


def query(ids):
    if QUIRKS.get("hang"):
        with open(os.path.join(ROOT, "hung.new"), "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, os.path.join(ROOT, "hung"))
        signal.pause()
    if QUIRKS.get("fail"):
        print(QUIRKS.get("says", "Unknown Error").replace("\\n", "\n"))
        return int(QUIRKS.get("status", "1"))
    wanted = [gpu for gpu in GPUS if ids is None or gpu["uuid"] in ids]
    if not wanted or (ids and len(ids) > 1 and QUIRKS.get("one_id")):
        print("No devices were found")
        return 6
    if "before" in QUIRKS:
        print(QUIRKS["before"].replace("\\n", "\n"))
    print('<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>')
    print(element("driver_version", "550.54.15") + element("attached_gpus", len(GPUS)))
    for gpu in wanted:
        if gpu.get("lost", "0") == "0":
            print(report(gpu))
    print("</nvidia_smi_log>")
    for gpu in wanted:
        if gpu.get("lost", "0") != "0":
            line = QUIRKS.get("lost_line", "Unable to determine the device handle for GPU {bus}: GPU is lost.")
            print(line.format(index=GPUS.index(gpu), bus=gpu["bus"], short=gpu["bus"][4:]))
    if any(gpu.get("lost", "0") != "0" for gpu in wanted):
        return 15
    if "after" in QUIRKS:
        print(QUIRKS["after"].replace("\\n", "\n"))
    return 0


def older(argument):
    """What the older package asks in one of its arguments."""
    if argument == "-q":
        print(f"Attached GPUs : {len(GPUS)}" + "\n    Display Mode : Disabled" * len(GPUS))
    for index, gpu in enumerate(GPUS):
        if argument == "--query-gpu=index,gpu_bus_id":
            print(f"{index}, {gpu['bus'].upper()}")
        elif argument == "--query-compute-apps=pid,gpu_bus_id":
            for pid, _, kind in processes(gpu["uuid"]):
                if not kind:
                    print(f"{pid}, {gpu['bus'].upper()}")


def rewrite(name, change):
    """Write a file anew, with what ``change`` returns for each of its lines."""
    path = os.path.join(ROOT, name)
    if os.path.exists(path):
        with open(path) as file:
            lines = [change(line.rstrip("\n")) for line in file]
        with open(f"{path}.new", "w") as file:
            file.writelines(f"{line}\n" for line in lines if line)
        os.rename(f"{path}.new", path)


def without(*keys):
    """Return a function that takes these keys out of a line."""
    return lambda line: " ".join(pair for pair in line.split() if pair.partition("=")[0] not in keys)


def turn_persistence_mode_on():
    rewrite("gpus", lambda line: f"{without('persistence')(line)} persistence=1")
    rewrite("options", without("call_ms"))


def reset():
    rewrite("gpus", without("lost", "recovery", "remap", "util"))
    rewrite("options", without("hangs"))
    for uuid in os.listdir(os.path.join(ROOT, "procs")):
        for name in os.listdir(os.path.join(ROOT, "procs", uuid)):
            if ".static" in name:
                os.unlink(os.path.join(ROOT, "procs", uuid, name))


def set_ready_state():
    rewrite("options", without("cuda_init_error"))


BY_ROOT = {"-pm 1": turn_persistence_mode_on, "-r": reset, "conf-compute -srs 1": set_ready_state}


def main():
    with open(os.path.join(ROOT, "runs"), "a") as file:
        file.write(" ".join(sys.argv[1:]) + "\n")
    if " ".join(sys.argv[1:]) in BY_ROOT:
        BY_ROOT[" ".join(sys.argv[1:])]()
        return 0
    if sys.argv[1:3] != ["-q", "-x"]:
        for argument in sys.argv[1:]:
            older(argument)
        return 0
    if os.environ.get("LC_ALL") != "C":
        print("Die Ausgabe ist nicht in der Sprache, die erwartet wird")
        return 1
    return query(sys.argv[4].split(",") if sys.argv[3:4] == ["-i"] else None)


sys.exit(main())
