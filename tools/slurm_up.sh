#!/bin/bash
# Brings up a real Slurm (Debian's packages) on this machine for tests, in seconds and without systemd: slurmctld and
# NODES slurmd's, the nodes n1, n2, ...
#
#   slurm_up.sh [up]       install missing packages and start Slurm; does nothing if it runs already
#   slurm_up.sh run CMD..  run CMD as the ordinary user $JOB_USER on the submit host
#   slurm_up.sh root CMD.. run CMD as root there
#   slurm_up.sh down       end the daemons and all jobs
#
# Settings, from the environment of `up`:
#   NODES=2        number of nodes
#   GPUS=4         amount of the gres "gpu" on each node; 0: no gres is configured
#   CPUS=8         configured CPUs of each node, independent of the real ones
#   AUTH=munge     or none
#   TASK=none      or affinity
#   PRIVATE_TMP=1  job_container/tmpfs: each job has its own /tmp and /dev/shm
#   GRES_FLAGS=    Flags of the GPUs in gres.conf, such as amd_gpu_env (only ROCR_VISIBLE_DEVICES is set)
#   CONSTRAIN=1    ConstrainDevices, so that CUDA_VISIBLE_DEVICES counts from 0 in every job; needs cgroup v1
#   JOB_USER       the user for `run`, created if missing (gpujobs)
#   SLURM_SCRATCH  directory for pid and logs (/tmp/safe-gpu-slurm)
#
# Needs root, iproute2 and util-linux. The daemons run in new namespaces (see namespaces.sh), with their state on a
# tmpfs. The packages, the user and $SLURM_SCRATCH stay on the machine.
set -euo pipefail

scheduler=Slurm
scratch=${SLURM_SCRATCH:-/tmp/safe-gpu-slurm}
nodes=${NODES:-2} gpus=${GPUS:-4} cpus=${CPUS:-8} auth=${AUTH:-munge} task=${TASK:-none}
private_tmp=${PRIVATE_TMP:-} constrain=${CONSTRAIN:-} gres_flags=${GRES_FLAGS:-}

. "$(dirname "$(realpath "$0")")/namespaces.sh"

up() {
  if running; then return; fi
  if [ "$constrain" ] && [ ! -d /sys/fs/cgroup/devices ]; then
    echo "slurm_up.sh: CONSTRAIN=1 needs the devices controller of cgroup v1, which this machine does not have" >&2
    exit 1
  fi
  mkdir -p "$scratch"
  install_slurm
  # job_container/tmpfs binds the mount namespace of a job to a file, which Linux allows only in a namespace with a lower
  # id. Since Linux 6.18 each CPU hands out ids of its own range, so all namespaces are created on one CPU.
  if [ "$private_tmp" ]; then on_cpus=(taskset -c "$(taskset -cp $$ | sed 's/.*: *\([0-9]*\).*/\1/')"); fi
  start_inside SLURM_SCRATCH="$scratch" NODES="$nodes" GPUS="$gpus" CPUS="$cpus" AUTH="$auth" \
    TASK="$task" PRIVATE_TMP="$private_tmp" CONSTRAIN="$constrain" GRES_FLAGS="$gres_flags"
}

install_slurm() {
  [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ -x /usr/sbin/munged ] && [ -x /usr/bin/sbatch ] && return
  install_packages slurmctld slurmd slurm-client munge
}

remove_cgroups() { # CONSTRAIN=1 leaves them
  local dir
  for dir in /sys/fs/cgroup/{devices,freezer,cpuset,memory}/slurm_n*; do
    if [ -d "$dir" ]; then find "$dir" -depth -type d -exec rmdir {} \; ; fi
  done
}

# ---- The functions below run inside the namespaces, as their pid 1 ----

network() {
  # Slurm resolves names with AI_ADDRCONFIG, which fails if there are only loopback addresses. A veth pair with both ends
  # in this namespace provides one. A further address on lo is not enough: Open MPI then finds no network interface.
  hostname slurmhost
  veth_pair sch0 sch1
  ip link set sch1 up
  printf '127.0.0.1 localhost\n10.77.0.1 slurmhost %s\n' "${node_names[*]}" >"$scratch/hosts"
  mount --bind "$scratch/hosts" /etc/hosts
}

gpu_devices() {
  # gres.conf needs character devices: with plain files jobs get no GPU numbers. Without CONSTRAIN all of them have the
  # device number of /dev/null. With CONSTRAIN their numbers differ and have no driver, for the device cgroup.
  local node gpu minor=0
  mkdir -p /run/fakegpu
  for node in "${node_names[@]}"; do
    for gpu in $(seq 0 $((gpus - 1))); do
      if [ "$constrain" ]; then mknod -m 666 "/run/fakegpu/$node-gpu$gpu" c 195 $((minor++))
      else mknod -m 666 "/run/fakegpu/$node-gpu$gpu" c 1 3; fi
    done
    echo "NodeName=$node Name=gpu File=/run/fakegpu/$node-gpu[0-$((gpus - 1))] ${gres_flags:+Flags=$gres_flags}" >>/etc/slurm/gres.conf
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
  name_failures
  local node
  mapfile -t node_names < <(seq -f n%g "$nodes")
  network
  mkdir -p /etc/slurm
  for dir in /run /etc/slurm; do mount -t tmpfs -o mode=755 tmpfs "$dir"; done # empty, without files of an earlier run
  mkdir -p /run/slurm/ctld
  if [ "$auth" = munge ]; then # its package has created /etc/munge/munge.key
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
  stay
}

case ${1:-up} in
up) up ;;
down)
  down
  remove_cgroups
  ;;
run) need_running; inside "${as_user[@]}" "${@:2}" ;;
root) need_running; inside "${@:2}" ;;
inside-namespaces) inside_namespaces ;;
*) usage ;;
esac
