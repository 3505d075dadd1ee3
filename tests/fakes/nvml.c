/* A stand-in for libnvidia-ml.so.1: a real shared library whose GPUs are described by text files.
 *
 * Everything is read anew at every call from the directory that $FAKE_GPU_DIR names, so that a test changes the host
 * under a running process by rewriting a file (write a new file and rename it: a call may come at any moment).
 *
 * $FAKE_GPU_DIR/gpus      one line per GPU in NVML's order, key=value separated by spaces; `#` starts a comment line:
 *     uuid=GPU-...            required
 *     name=NVIDIA_A100        underscores are shown as spaces
 *     bus=00000000:07:00.0    PCI bus id, 8-digit domain
 *     mem=BYTES               total memory;   used=BYTES   in use besides the processes below (default 0)
 *     util=N                  percent;        util=NA      answers NOT_SUPPORTED
 *     mode=0..3               compute mode as NVML numbers it (0 default, 2 prohibited, 3 exclusive process)
 *     display=0|1             display active
 *     mig=0|1                 MIG mode;       mig=NA       answers NOT_SUPPORTED (also when the key is absent)
 *     instances=U1,,U2        UUIDs of MIG instances by slot; an empty slot answers NOT_FOUND;   imem=BYTES  their size
 *     lost=0|1                every call about this GPU answers GPU_IS_LOST once a handle is out; =2: no handle either
 *     nvlink=UUID,UUID        GPUs that NVLink connects it to
 *     node_cpus=0-3,8         CPUs next to it; socket_cpus=...  those of its socket (default: as node_cpus)
 *     speed=N                 for the fake CUDA: rank in FASTEST_FIRST order, highest first
 *     FIELD_error=CODE        that question answers this NVML code; FIELD is one of handle uuid name pci memory memory_v2
 *                             util mode display mig compute graphics mps imemory icompute (the last two: MIG instances)
 *
 * $FAKE_GPU_DIR/procs/UUID/PID   a process on that GPU or MIG instance; the content is its memory in bytes in decimal
 *     (empty: not available). It counts only while /proc/PID exists. Suffixes, in this order, each optional:
 *         PID.static              counts always (a host pid that does not resolve in a container)
 *         .graphics  .mps         it stands in that list instead of the compute list
 *     e.g. 4711, 99999.static, 4711.graphics, 99999.static.mps. Names that do not start with a digit are ignored.
 *     A MIG parent lists the processes of its instances too, with their GPU instance id (slot + 1).
 *
 * $FAKE_GPU_DIR/options   key=value, one a line:
 *     driver_version=550.54.15
 *     init_error=CODE         nvmlInit answers this
 *     session_error=CODE      every call but nvmlInit and nvmlShutdown answers this (the driver went away)
 *     lag_ms=N                a process shows N ms after its file was last written
 *     log=1                   append the name of every NVML function called to $FAKE_GPU_DIR/calls
 *     race=N                  the first N process lists with rows answer INSUFFICIENT_SIZE whatever room they are given
 *
 * Handles are valid in the process that called nvmlInit only: after fork() everything answers UNINITIALIZED until the
 * child calls nvmlInit, and a handle of the parent answers INVALID_ARGUMENT.
 *
 * Compile:  gcc -shared -fPIC -O1 -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml.c
 * Variants: -DNO_V3 lacks the _v3 process lists and memory_v2, -DNO_V2 lacks the _v2 ones as well,
 *           -DNO_PROCESSES lacks them all, -DNO_SCOPE lacks nvmlDeviceGetCpuAffinityWithinScope, -DNO_MPS the MPS lists,
 *           -DNO_MIG everything about MIG, -DANCIENT lacks nvmlInitWithFlags and the versioned count, handle and PCI calls.
 */
