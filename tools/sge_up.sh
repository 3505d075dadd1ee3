#!/bin/bash
# Brings up a real Grid Engine (Debian's Son of Grid Engine) on this machine for tests, in seconds and without systemd.
#
#   sge_up.sh [up]         install the packages that are missing and start it; does nothing when it runs already
#   sge_up.sh run CMD..    run CMD as the ordinary user $JOB_USER on the submit host, sgehost
#   sge_up.sh host2 CMD..  the same on the second execution host, sgehost2 (HOSTS=2)
#   sge_up.sh root CMD..   run CMD as root, who is a manager of this Grid Engine (qconf, qmod)
#   sge_up.sh down         end the daemons and every job
#
# Settings, from the environment of `up`:
#   HOSTS=1      execution hosts, 1 or 2
#   SLOTS=8      slots of the queue all.q on each
#   GPUS=4       how many of the consumable "gpu" each has; it is counted per slot
#   JOB_USER     the user whom `run` becomes, made if need be (gpujobs); root's own jobs Grid Engine refuses
#   SGE_SCRATCH  where pid, configuration and logs are kept (/tmp/safe-gpu-sge)
#
# Needs root, iproute2 and util-linux. The daemons live in network, UTS, mount and pid namespaces of their own: nothing
# of them can be reached from outside, they reach nothing, and ending pid 1 in there ends them all. Their state is on a
# tmpfs. What stays on the machine: the packages, the user, $SGE_SCRATCH. /tmp is the machine's own.
set -euo pipefail

scratch=${SGE_SCRATCH:-/tmp/safe-gpu-sge}
user=${JOB_USER:-gpujobs}
hosts=${HOSTS:-1} slots=${SLOTS:-8} gpus=${GPUS:-4}
export SGE_ROOT=/var/lib/gridengine SGE_CELL=default
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

usage() { sed -n '4,8s/^# *//p' "$0" >&2; exit 2; }
# The pid of last time may be someone else's by now.
running() { [ -s "$scratch/pid" ] && grep -qs inside-namespaces "/proc/$(cat "$scratch/pid")/cmdline"; }
need_running() { running || { echo "sge_up.sh: not running: start it with '$0 up'" >&2; exit 1; }; }
# /tmp is shared between the namespaces, so the caller's working directory is the same place in there.
inside() { nsenter -t "$(cat "$scratch/pid")" -n -u -m -p --wd="$PWD" "$@"; }
as_user=(setpriv --reuid "$user" --regid "$user" --init-groups env "HOME=/home/$user" "USER=$user" "LOGNAME=$user")

install_packages() {
  [ -x /usr/sbin/sge_qmaster ] && [ -x /usr/sbin/sge_execd ] && [ -x /usr/bin/qsub ] && return
  export DEBIAN_FRONTEND=noninteractive
  if [ ! -e /usr/sbin/policy-rc.d ]; then # else the packages start daemons on the real network
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  for part in common client master exec; do
    printf '%s\n' "gridengine-$part shared/gridengineconfig boolean true" \
      "gridengine-$part shared/gridenginecell string $SGE_CELL" "gridengine-$part shared/gridenginemaster string sgehost"
  done | debconf-set-selections
  apt-get install -y -qq --no-install-recommends gridengine-master gridengine-exec gridengine-client \
    >"$scratch/apt.log" 2>&1 || { tail -5 "$scratch/apt.log" >&2; exit 1; }
}

up() {
  if running; then return; fi
  mkdir -p "$scratch"
  install_packages
  id "$user" >/dev/null 2>&1 || useradd -m -s /bin/bash "$user"
  rm -f "$scratch/ready"
  env -i PATH=$path LANG=C.UTF-8 SGE_SCRATCH="$scratch" HOSTS="$hosts" SLOTS="$slots" GPUS="$gpus" \
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
    echo "sge_up.sh: Grid Engine did not come up:" >&2
    cat "$scratch/init.log" >&2
    exit 1
  fi
  pgrep -P $unshare >"$scratch/pid" # the only child of unshare is pid 1 inside
}

down() {
  local pid
  if running; then
    pid=$(cat "$scratch/pid")
    kill -KILL "$pid" # pid 1 of its namespace: all in there die with it
    while running; do sleep .05; done
  fi
  rm -f "$scratch/pid"
}

# ---- from here on: inside the namespaces, as their pid 1 ----

network() {
  # Grid Engine compares the reverse look-up of its peer's address with its own host name: one address per host, and
  # one name per address.
  hostname sgehost
  ip link set lo up
  ip link add sge0 type veth peer name sge1
  ip addr add 10.77.0.1/24 dev sge0
  ip link set sge0 up
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
  for dir in $spool "$SGE_ROOT/$SGE_CELL" /run; do mount -t tmpfs -o mode=755 tmpfs "$dir"; done # nothing of last time
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

record() { printf '%s NONE\n' "${@:2}" >>"$1"; } # "attribute NONE" lines, which qconf insists on

configure() {
  local conf=$scratch/conf host pe
  rm -rf "$conf" && mkdir -p "$conf"
  { qconf -sc | grep -v '^#'; echo 'gpu gpu INT <= YES YES 0 0'; } >"$conf/complexes" # YES: consumed per slot
  qconf -Mc "$conf/complexes"
  # It looks for work every 15 s by default; here every second, and as soon as a job comes or goes.
  qconf -ssconf | sed 's/^schedule_interval .*/schedule_interval 0:0:1/; s/^flush_\(submit\|finish\)_sec .*/flush_\1_sec 1/' \
    >"$conf/scheduler"
  qconf -Msconf "$conf/scheduler"
  qconf -sconf | grep -v '^#' | sed 's/^load_report_time .*/load_report_time 0:0:2/
    s/^administrator_mail .*/administrator_mail none/; s/^execd_params .*/execd_params ENABLE_ADDGRP_KILL=true/' >"$conf/global"
  qconf -Mconf "$conf/global"
  for host in "${host_names[@]}"; do
    qconf -as "$host"
    if [ "$host" != sgehost ]; then qconf -ah "$host"; fi
    printf '%s\n' "hostname $host" "complex_values gpu=$gpus" >"$conf/$host"
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
  # load_thresholds NONE: a busy machine would close the queue.
  qconf -sq | sed "s/^qname .*/qname all.q/; s/^hostlist .*/hostlist @allhosts/; s/^slots .*/slots $slots/
    s/^pe_list .*/pe_list smp mpi/; s/^shell .*/shell \/bin\/bash/; s/^load_thresholds .*/load_thresholds NONE/" >"$conf/queue"
  qconf -Aq "$conf/queue"
}

inside_namespaces() {
  trap 'echo "failed at line $LINENO"' ERR
  set -E
  host_names=(sgehost)
  network
  master
  if [ "$hosts" = 2 ]; then second_host; host_names+=(sgehost2); else ip link set sge1 up; fi
  configure
  # env -i: execd hands its own environment on to every job.
  local execd=(env -i PATH=$path LANG=C.UTF-8 SGE_ROOT=$SGE_ROOT SGE_CELL=$SGE_CELL /usr/sbin/sge_execd)
  "${execd[@]}"
  if [ "$hosts" = 2 ]; then nsenter -n/run/gridengine/net2 -u/run/gridengine/uts2 "${execd[@]}"; fi
  for _ in $(seq 150); do # a host counts once it has told its number of processors
    if [ "$(qhost | grep -c '^sgehost.*lx-[a-z0-9]*  *[0-9]')" = "$hosts" ]; then break; fi
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
host2) need_running; inside nsenter -n/run/gridengine/net2 -u/run/gridengine/uts2 --wd="$PWD" "${as_user[@]}" "${@:2}" ;;
root) need_running; inside "${@:2}" ;;
inside-namespaces) inside_namespaces ;;
*) usage ;;
esac
