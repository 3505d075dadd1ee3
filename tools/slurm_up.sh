#!/bin/bash
# Brings up a real Slurm (Debian's packages) on this machine for tests, in seconds and without systemd: slurmctld and
# NODES slurmd's, the nodes n1, n2, ...
#
#   slurm_up.sh [up]       install the packages that are missing and start it; does nothing when it runs already
#   slurm_up.sh run CMD..  run CMD as the ordinary user $JOB_USER on the submit host
#   slurm_up.sh root CMD.. run CMD as root there
#   slurm_up.sh down       end the daemons and every job
#
# Settings, from the environment of `up`:
#   NODES=2        nodes
#   GPUS=4         of the gres "gpu" per node; 0: this Slurm knows no GPUs
#   CPUS=8         per node, pretended
#   AUTH=munge     or none
#   TASK=none      or affinity
#   PRIVATE_TMP=1  job_container/tmpfs: each job has a /tmp and a /dev/shm of its own
#   CONSTRAIN=1    ConstrainDevices, so that CUDA_VISIBLE_DEVICES counts from 0 in every job; needs cgroup v1
#   JOB_USER       the user whom `run` becomes, made if need be (gpujobs)
#   SLURM_SCRATCH  where pid and logs are kept (/tmp/safe-gpu-slurm)
#
# Needs root, iproute2 and util-linux. The daemons live in network, UTS, mount and pid namespaces of their own: nothing
# of them can be reached from outside, they reach nothing, and ending pid 1 in there ends them all. Their state is on a
# tmpfs. What stays on the machine: the packages, the user, $SLURM_SCRATCH. /tmp is the machine's own.
set -euo pipefail

scratch=${SLURM_SCRATCH:-/tmp/safe-gpu-slurm}
user=${JOB_USER:-gpujobs}
nodes=${NODES:-2} gpus=${GPUS:-4} cpus=${CPUS:-8} auth=${AUTH:-munge} task=${TASK:-none}
private_tmp=${PRIVATE_TMP:-} constrain=${CONSTRAIN:-}
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

usage() { sed -n '5,8s/^# *//p' "$0" >&2; exit 2; }
# The pid of last time may be someone else's by now.
running() { [ -s "$scratch/pid" ] && grep -qs inside-namespaces "/proc/$(cat "$scratch/pid")/cmdline"; }
need_running() { running || { echo "slurm_up.sh: not running: start it with '$0 up'" >&2; exit 1; }; }
# /tmp is shared between the namespaces, so the caller's working directory is the same place in there.
inside() { nsenter -t "$(cat "$scratch/pid")" -n -u -m -p --wd="$PWD" "$@"; }
as_user=(setpriv --reuid "$user" --regid "$user" --init-groups env "HOME=/home/$user" "USER=$user" "LOGNAME=$user")

install_packages() {
  [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ -x /usr/sbin/munged ] && [ -x /usr/bin/sbatch ] && return
  export DEBIAN_FRONTEND=noninteractive
  if [ ! -e /usr/sbin/policy-rc.d ]; then # else the packages start daemons on the real network
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge \
    >"$scratch/apt.log" 2>&1 || { tail -5 "$scratch/apt.log" >&2; exit 1; }
}

up() {
  if running; then return; fi
  if [ "$constrain" ] && [ ! -d /sys/fs/cgroup/devices ]; then
    echo "slurm_up.sh: CONSTRAIN=1 needs the devices controller of cgroup v1, which this machine does not have" >&2
    exit 1
  fi
  mkdir -p "$scratch"
  install_packages
  id "$user" >/dev/null 2>&1 || useradd -m -s /bin/bash "$user"
  rm -f "$scratch/ready"
  env -i PATH=$path LANG=C.UTF-8 SLURM_SCRATCH="$scratch" NODES="$nodes" GPUS="$gpus" CPUS="$cpus" AUTH="$auth" \
    TASK="$task" PRIVATE_TMP="$private_tmp" CONSTRAIN="$constrain" \
    setsid unshare --net --uts --mount --pid --fork --kill-child --mount-proc "$(realpath "$0")" inside-namespaces \
    >"$scratch/init.log" 2>&1 </dev/null &
  local unshare=$!
  for _ in $(seq 300); do
    if [ -e "$scratch/ready" ]; then break; fi
    kill -0 $unshare 2>/dev/null || break
    sleep .1
  done
  if [ ! -e "$scratch/ready" ]; then
    kill -KILL $unshare 2>/dev/null || true # --kill-child ends what it started
    echo "slurm_up.sh: Slurm did not come up:" >&2
    cat "$scratch/init.log" >&2
    exit 1
  fi
  pgrep -P $unshare >"$scratch/pid" # the only child of unshare is pid 1 inside
}

down() {
  local pid dir
  if running; then
    pid=$(cat "$scratch/pid")
    kill -KILL "$pid" # pid 1 of its namespace: all in there die with it
    while running; do sleep .05; done
  fi
  rm -f "$scratch/pid"
  for dir in /sys/fs/cgroup/{devices,freezer,cpuset,memory}/slurm_n*; do # CONSTRAIN=1 leaves them
    if [ -d "$dir" ]; then find "$dir" -depth -type d -exec rmdir {} \; ; fi
  done
}

# ---- from here on: inside the namespaces, as their pid 1 ----

network() {
  # Slurm resolves names with AI_ADDRCONFIG: were there loopback addresses only, every look-up would fail. A veth pair
  # with both its ends here, rather than one more address on lo: with that Open MPI finds no network interface.
  hostname slurmhost
  ip link set lo up
  ip link add sch0 type veth peer name sch1
  ip addr add 10.77.0.1/24 dev sch0
  ip link set sch0 up
  ip link set sch1 up
  printf '127.0.0.1 localhost\n10.77.0.1 slurmhost %s\n' "${node_names[*]}" >"$scratch/hosts"
  mount --bind "$scratch/hosts" /etc/hosts
}

gpu_devices() {
  # gres.conf wants character devices: plain files are accepted, but then jobs get no GPU numbers. Without CONSTRAIN
  # they are twins of /dev/null; with it distinct ones, with nothing behind them, for the device cgroup to tell apart.
  local node gpu minor=0
  mkdir -p /run/fakegpu
  for node in "${node_names[@]}"; do
    for gpu in $(seq 0 $((gpus - 1))); do
      if [ "$constrain" ]; then mknod -m 666 "/run/fakegpu/$node-gpu$gpu" c 195 $((minor++))
      else mknod -m 666 "/run/fakegpu/$node-gpu$gpu" c 1 3; fi
    done
    echo "NodeName=$node Name=gpu File=/run/fakegpu/$node-gpu[0-$((gpus - 1))]" >>/etc/slurm/gres.conf
  done
}

configure() {
  local gres='' proctrack=linuxproc task_plugins=task/$task
  if [ "$constrain" ]; then proctrack=cgroup task_plugins=task/cgroup,task/$task; fi
  if [ "$gpus" != 0 ]; then gres="Gres=gpu:$gpus"; gpu_devices; fi
  cat >/etc/slurm/slurm.conf <<CONF
ClusterName=test
SlurmctldHost=slurmhost
AuthType=auth/$auth
CredType=cred/$auth
SlurmUser=root
StateSaveLocation=/run/slurm/ctld
SlurmdSpoolDir=/run/slurm/%n
SlurmctldPidFile=/run/slurm/ctld.pid
SlurmdPidFile=/run/slurm/%n.pid
SlurmctldLogFile=/run/slurm/ctld.log
SlurmdLogFile=/run/slurm/%n.log
ProctrackType=proctrack/$proctrack
TaskPlugin=$task_plugins
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
${gres:+GresTypes=gpu}
NodeName=n[1-$nodes] NodeHostname=slurmhost NodeAddr=slurmhost Port=[17001-$((17000 + nodes))] CPUs=$cpus Boards=1 SocketsPerBoard=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=2000 $gres
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  if [ "$constrain" ]; then printf '%s\n' CgroupPlugin=cgroup/v1 ConstrainDevices=yes >/etc/slurm/cgroup.conf; fi
  if [ "$private_tmp" ]; then
    printf '%s\n' JobContainerType=job_container/tmpfs PrologFlags=contain >>/etc/slurm/slurm.conf
    printf '%s\n' AutoBasePath=true BasePath=/run/jobtmp >/etc/slurm/job_container.conf
  fi
}

inside_namespaces() {
  trap 'echo "failed at line $LINENO"' ERR
  set -E
  local node
  mapfile -t node_names < <(seq -f n%g "$nodes")
  network
  mkdir -p /etc/slurm
  for dir in /run /etc/slurm; do mount -t tmpfs -o mode=755 tmpfs "$dir"; done # nothing of last time
  mkdir -p /run/slurm/ctld
  if [ "$auth" = munge ]; then # its package has made /etc/munge/munge.key
    mkdir -p /run/munge
    chown munge: /run/munge
    setpriv --reuid munge --regid munge --clear-groups /usr/sbin/munged
  fi
  configure
  slurmctld
  for node in "${node_names[@]}"; do
    mkdir "/run/slurm/$node"
    slurmd -N "$node"
  done
  for _ in $(seq 150); do
    if [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" = "$nodes" ]; then break; fi
    sleep .1
  done
  touch "$scratch/ready"
  trap : CHLD
  while :; do sleep 86400 & wait; done # pid 1 reaps the orphans
}

case ${1:-up} in
up) up ;;
down) down ;;
run) need_running; inside "${as_user[@]}" "${@:2}" ;;
root) need_running; inside "${@:2}" ;;
inside-namespaces) inside_namespaces ;;
*) usage ;;
esac
