#!/bin/bash
# Brings up a real Grid Engine (Debian's Son of Grid Engine) on this machine for tests, in seconds and without systemd.
#
#   sge_up.sh [up]         install missing packages and start Grid Engine; does nothing if it runs already
#   sge_up.sh run CMD..    run CMD as the ordinary user $JOB_USER on the submit host, sgehost
#   sge_up.sh host2 CMD..  the same on the second execution host, sgehost2 (HOSTS=2)
#   sge_up.sh root CMD..   run CMD as root, a manager of this Grid Engine (qconf, qmod)
#   sge_up.sh down         end the daemons and all jobs
#
# Settings, from the environment of `up`:
#   HOSTS=1      execution hosts, 1 or 2
#   SLOTS=8      slots of the queue all.q on each host
#   GPUS=4       amount of the consumable "gpu" on each host, counted per slot, and of "ngpus", counted per job;
#                each host has the flag "has_gpu", too
#   JOB_USER     the user for `run`, created if missing (gpujobs); Grid Engine refuses jobs of root
#   SGE_SCRATCH  directory for pid, configuration and logs (/tmp/safe-gpu-sge)
#
# Needs root, iproute2 and util-linux. The daemons run in new namespaces (see namespaces.sh), with their state on a
# tmpfs. The packages, the user and $SGE_SCRATCH stay on the machine.
set -euo pipefail

scheduler="Grid Engine"
scratch=${SGE_SCRATCH:-/tmp/safe-gpu-sge}
hosts=${HOSTS:-1} slots=${SLOTS:-8} gpus=${GPUS:-4}
export SGE_ROOT=/var/lib/gridengine SGE_CELL=default

. "$(dirname "$(realpath "$0")")/namespaces.sh"

up() {
  if running; then return; fi
  mkdir -p "$scratch"
  install_grid_engine
  start_inside SGE_SCRATCH="$scratch" HOSTS="$hosts" SLOTS="$slots" GPUS="$gpus"
}

install_grid_engine() {
  [ -x /usr/sbin/sge_qmaster ] && [ -x /usr/sbin/sge_execd ] && [ -x /usr/bin/qsub ] && return
  for part in common client master exec; do
    printf '%s\n' "gridengine-$part shared/gridengineconfig boolean true" \
      "gridengine-$part shared/gridenginecell string $SGE_CELL" "gridengine-$part shared/gridenginemaster string sgehost"
  done | debconf-set-selections
  install_packages gridengine-master gridengine-exec gridengine-client
}

# ---- The functions below run inside the namespaces, as their pid 1 ----

network() {
  # Grid Engine compares the reverse look-up of a peer's address with the peer's host name. So each host has one address,
  # and each address one name.
  hostname sgehost
  veth_pair sge0 sge1
  printf '127.0.0.1 localhost\n10.77.0.1 sgehost\n10.77.0.2 sgehost2\n' >"$scratch/hosts"
  mount --bind "$scratch/hosts" /etc/hosts
}

second_host() {
  touch /run/gridengine/{net2,uts2}
  unshare --net --uts sleep infinity &
  local pid=$!
  while [ "$(readlink /proc/$pid/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep .02; done
  ip link set sge1 netns $pid
  nsenter -t $pid -n -u sh -c 'hostname sgehost2; ip link set lo up; ip addr add 10.77.0.2/24 dev sge1; ip link set sge1 up'
  mount --bind /proc/$pid/ns/net /run/gridengine/net2
  mount --bind /proc/$pid/ns/uts /run/gridengine/uts2
}

master() {
  local spool=/var/spool/gridengine
  for dir in $spool "$SGE_ROOT/$SGE_CELL" /run; do mount -t tmpfs -o mode=755 tmpfs "$dir"; done # empty, without files of an earlier run
  mkdir -p /run/gridengine $spool/{qmaster/job_scripts,spooldb,execd} "$SGE_ROOT/$SGE_CELL/common"
  cp /usr/share/gridengine/default-bootstrap "$SGE_ROOT/$SGE_CELL/common/bootstrap"
  echo sgehost >"$SGE_ROOT/$SGE_CELL/common/act_qmaster"
  chown -R sgeadmin: /run/gridengine $spool "$SGE_ROOT/$SGE_CELL"
  setpriv --reuid sgeadmin --regid sgeadmin --clear-groups \
    /usr/share/gridengine/scripts/init_cluster "$SGE_ROOT" "$SGE_CELL" $spool/spooldb sgeadmin >/dev/null
  SGE_MASTER_PIDFILE=/run/gridengine/qmaster.pid /usr/sbin/sge_qmaster
  for _ in $(seq 100); do
    if qconf -sh >/dev/null 2>&1; then break; fi
    sleep .1
  done
}

record() { printf '%s NONE\n' "${@:2}" >>"$1"; } # "attribute NONE" lines, which qconf requires

configure() {
  local conf=$scratch/conf host pe
  rm -rf "$conf" && mkdir -p "$conf"
  # Consumable per slot (YES) and per job; has_gpu is a flag.
  printf '%s\n' 'gpu gpu INT <= YES YES 0 0' 'ngpus ngpus INT <= YES JOB 0 0' 'has_gpu has_gpu BOOL == YES NO FALSE 0' \
    "$(qconf -sc | grep -v '^#')" >"$conf/complexes"
  qconf -Mc "$conf/complexes"
  # Schedule every second (default: 15 s), and as soon as a job is submitted or ends.
  qconf -ssconf | sed 's/^schedule_interval .*/schedule_interval 0:0:1/; s/^flush_\(submit\|finish\)_sec .*/flush_\1_sec 1/' \
    >"$conf/scheduler"
  qconf -Msconf "$conf/scheduler"
  qconf -sconf | grep -v '^#' | sed 's/^load_report_time .*/load_report_time 0:0:2/
    s/^administrator_mail .*/administrator_mail none/; s/^execd_params .*/execd_params ENABLE_ADDGRP_KILL=true/' >"$conf/global"
  qconf -Mconf "$conf/global"
  for host in "${host_names[@]}"; do
    qconf -as "$host"
    if [ "$host" != sgehost ]; then qconf -ah "$host"; fi
    printf '%s\n' "hostname $host" "complex_values gpu=$gpus,ngpus=$gpus,has_gpu=TRUE" >"$conf/$host"
    record "$conf/$host" load_scaling user_lists xuser_lists projects xprojects usage_scaling report_variables
    qconf -Ae "$conf/$host"
  done
  printf 'group_name @allhosts\nhostlist %s\n' "${host_names[*]}" >"$conf/group"
  qconf -Ahgrp "$conf/group"
  for pe in 'smp $pe_slots' 'mpi $round_robin'; do
    printf '%s\n' "pe_name ${pe% *}" "allocation_rule ${pe#* }" 'slots 999' 'control_slaves TRUE' 'job_is_first_task FALSE' \
      'urgency_slots min' 'accounting_summary FALSE' >"$conf/pe"
    record "$conf/pe" user_lists xuser_lists start_proc_args stop_proc_args qsort_args
    qconf -Ap "$conf/pe"
  done
  # load_thresholds NONE, or the load of a busy machine would close the queue.
  qconf -sq | sed "s/^qname .*/qname all.q/; s/^hostlist .*/hostlist @allhosts/; s/^slots .*/slots $slots/
    s/^pe_list .*/pe_list smp mpi/; s/^shell .*/shell \/bin\/bash/; s/^load_thresholds .*/load_thresholds NONE/" >"$conf/queue"
  qconf -Aq "$conf/queue"
}

inside_namespaces() {
  name_failures
  host_names=(sgehost)
  network
  master
  if [ "$hosts" = 2 ]; then second_host; host_names+=(sgehost2); else ip link set sge1 up; fi
  configure
  # env -i, because execd passes its environment to every job.
  local execd=(env -i PATH=$path LANG=C.UTF-8 SGE_ROOT=$SGE_ROOT SGE_CELL=$SGE_CELL /usr/sbin/sge_execd)
  "${execd[@]}"
  if [ "$hosts" = 2 ]; then nsenter -n/run/gridengine/net2 -u/run/gridengine/uts2 "${execd[@]}"; fi
  for _ in $(seq 150); do # a host is ready when it has reported its number of processors
    if [ "$(qhost | grep -c '^sgehost.*lx-[a-z0-9]*  *[0-9]')" = "$hosts" ]; then break; fi
    sleep .1
  done
  stay
}

case ${1:-up} in
up) up ;;
down) down ;;
run) need_running; inside "${as_user[@]}" "${@:2}" ;;
host2) need_running; inside nsenter -n/run/gridengine/net2 -u/run/gridengine/uts2 --wd="$PWD" "${as_user[@]}" "${@:2}" ;;
root) need_running; inside "${@:2}" ;;
inside-namespaces) inside_namespaces ;;
*) usage ;;
esac
