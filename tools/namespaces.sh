# Common functions of sge_up.sh and slurm_up.sh, which source this file: installing packages, and running daemons in
# new namespaces.
#
# The script that sources it sets scheduler (a name for messages) and scratch (a directory for pid, configuration and
# logs). It defines a function inside_namespaces, which starts the daemons as pid 1 of the namespaces and calls stay;
# "$0 inside-namespaces" runs it.
#
# Needs root, iproute2 and util-linux. The daemons run in new network, UTS, mount and pid namespaces: they have no
# connection to other networks, and killing pid 1 of the namespaces ends them all. /tmp is shared with the machine.
# The packages, the user and $scratch stay on the machine.
# shellcheck shell=bash disable=SC2154

script=$(basename "$0")
user=${JOB_USER:-gpujobs}
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
on_cpus=() # a command that chooses the CPUs of the daemons
as_user=(setpriv --reuid "$user" --regid "$user" --init-groups env "HOME=/home/$user" "USER=$user" "LOGNAME=$user")

usage() { sed -n "s/^#   \($script .*\)/\1/p" "$0" >&2; exit 2; }
# A pid recorded earlier may belong to another process by now.
running() { [ -s "$scratch/pid" ] && grep -qs inside-namespaces "/proc/$(cat "$scratch/pid")/cmdline"; }
need_running() { running || { echo "$script: not running: start it with '$0 up'" >&2; exit 1; }; }
# /tmp is shared, so a working directory below it exists inside the namespaces too.
inside() { nsenter -t "$(cat "$scratch/pid")" -n -u -m -p --wd="$PWD" "$@"; }

install_packages() { # without starting the daemons of the packages on the real network
  export DEBIAN_FRONTEND=noninteractive
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  apt-get install -y -qq --no-install-recommends "$@" >"$scratch/apt.log" 2>&1 || { tail -5 "$scratch/apt.log" >&2; exit 1; }
}

start_inside() { # run inside_namespaces with these settings (NAME=VALUE ..) and no other environment
  id "$user" >/dev/null 2>&1 || useradd -m -s /bin/bash "$user"
  rm -f "$scratch/ready"
  env -i PATH=$path LANG=C.UTF-8 "$@" \
    setsid "${on_cpus[@]}" unshare --net --uts --mount --pid --fork --kill-child --mount-proc "$(realpath "$0")" inside-namespaces \
    >"$scratch/init.log" 2>&1 </dev/null &
  local unshare=$!
  for _ in $(seq 300); do
    if [ -e "$scratch/ready" ]; then break; fi
    kill -0 $unshare 2>/dev/null || break
    sleep .1
  done
  if [ ! -e "$scratch/ready" ]; then
    kill -KILL $unshare 2>/dev/null || true # --kill-child also kills its child
    echo "$script: $scheduler did not come up:" >&2
    cat "$scratch/init.log" >&2
    exit 1
  fi
  pgrep -P $unshare >"$scratch/pid" # the only child of unshare is pid 1 inside
}

down() {
  local pid
  if running; then
    pid=$(cat "$scratch/pid")
    kill -KILL "$pid" # pid 1: the kernel kills all processes of its namespace
    while running; do sleep .05; done
  fi
  rm -f "$scratch/pid"
}

# ---- The functions below run inside the namespaces, as their pid 1 ----

name_failures() { # write the line of a failed command to init.log, which start_inside prints
  trap 'echo "failed at line $LINENO"' ERR
  set -E
}

veth_pair() { # NAME0 NAME1: create a pair; NAME0 is up with address 10.77.0.1
  ip link set lo up
  ip link add "$1" type veth peer name "$2"
  ip addr add 10.77.0.1/24 dev "$1"
  ip link set "$1" up
}

stay() { # report that the daemons run, and reap orphans as pid 1
  touch "$scratch/ready"
  trap : CHLD
  while :; do sleep 86400 & wait; done
}
