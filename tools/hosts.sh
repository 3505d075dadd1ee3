#!/bin/bash
# Simulates several hosts on one machine with namespaces, for tests: hosta 10.77.0.1, hostb 10.77.0.2, ... up to hosth.
#
#   hosts.sh up [N]        make N hosts (2); does nothing if there are some already
#   hosts.sh run HOST CMD  run CMD on HOST
#   hosts.sh down          remove the hosts, and kill all processes on them
#
# Each host has its own host name, network, /dev/shm, safe_gpu state directory ($SAFE_GPU_DIR, /tmp/safe-gpu) and boot
# id. The hosts share the rest of the file system and the pid namespace. A bridge connects them, on the interface hsn0,
# without a route to other networks. ssh-stand-in/ beside this script is an ssh between the hosts.
#
# Needs root, iproute2 and util-linux. HOSTS_SCRATCH is the directory of its files (/tmp/safe-gpu-hosts).
set -euo pipefail

scratch=${HOSTS_SCRATCH:-/tmp/safe-gpu-hosts}
state=${SAFE_GPU_DIR:-/tmp/safe-gpu}
names=(hosta hostb hostc hostd hoste hostf hostg hosth)

usage() { sed -n '4,6s/^# *//p' "$0" >&2; exit 2; }
namespace() { readlink "/proc/$1/ns/net" 2>/dev/null || true; }
pid_of() { cat "$scratch/$1.pid"; }

start_host() {
  local host=$1
  cat /proc/sys/kernel/random/uuid >"$scratch/$host.bootid"
  mkdir -p "$scratch/$host.state"
  chmod 1777 "$scratch/$host.state"
  rm -f "$scratch/$host.ready"
  setsid unshare -n -u -m --propagation private bash -c "
    hostname $host && mount -t tmpfs tmpfs /dev/shm && mount --bind $scratch/hosts /etc/hosts &&
    mount --bind $scratch/$host.bootid /proc/sys/kernel/random/boot_id && mount --bind $scratch/$host.state $state &&
    ip link set lo up && readlink /proc/self/ns/net >$scratch/$host.ready && exec sleep infinity" \
    </dev/null >"$scratch/$host.log" 2>&1 &
  local pid=$!
  while [ ! -s "$scratch/$host.ready" ]; do
    kill -0 $pid 2>/dev/null || { echo "hosts.sh: $host did not come up:" >&2; cat "$scratch/$host.log" >&2; exit 1; }
    sleep .02
  done
  echo $pid >"$scratch/$host.pid"
}

join_network() {
  local number=$1 pid switch
  pid=$(pid_of "${names[number - 1]}")
  switch=(nsenter -t "$(pid_of hosta)" -n) # the bridge is in the network namespace of hosta
  if [ "$number" = 1 ]; then "${switch[@]}" sh -c 'ip link add br0 type bridge && ip link set br0 up'; fi
  "${switch[@]}" sh -c "ip link add p$number type veth peer name q$number && ip link set p$number master br0 &&
    ip link set p$number up && ip link set q$number netns $pid"
  nsenter -t "$pid" -n sh -c "ip link set q$number name hsn0 && ip addr add 10.77.0.$number/24 dev hsn0 && ip link set hsn0 up"
}

up() {
  local count=$1 number
  [[ $count =~ ^[1-8]$ ]] || { echo "hosts.sh: up takes a number of hosts from 1 to ${#names[@]}, not '$count'" >&2; exit 2; }
  if compgen -G "$scratch/*.pid" >/dev/null; then return; fi
  mkdir -p "$scratch" "$state"
  chmod 1777 "$state"
  echo '127.0.0.1 localhost' >"$scratch/hosts"
  for number in $(seq "$count"); do echo "10.77.0.$number ${names[number - 1]}" >>"$scratch/hosts"; done
  for number in $(seq "$count"); do
    start_host "${names[number - 1]}"
    join_network "$number"
  done
}

down() { # kills by network namespace. A recorded pid that is now in another namespace belongs to another process.
  local file host pid net process
  for file in "$scratch"/*.pid; do
    [ -e "$file" ] || continue
    host=$(basename "$file" .pid) pid=$(cat "$file") net=$(cat "$scratch/$host.ready")
    if [ "$(namespace "$pid")" = "$net" ]; then
      for process in /proc/[0-9]*; do
        process=${process#/proc/}
        if [ "$process" != "$pid" ] && [ "$(namespace "$process")" = "$net" ]; then kill -9 "$process" 2>/dev/null || true; fi
      done
      kill -9 "$pid" 2>/dev/null || true
    fi
    rm -f "$file"
  done
}

case ${1:-} in
up) up "${2:-2}" ;;
run)
  [ -e "$scratch/${2:-}.pid" ] || { echo "hosts.sh: no host '${2:-}'" >&2; exit 255; }
  exec nsenter -t "$(pid_of "$2")" -n -u -m --wd="$PWD" "${@:3}"
  ;;
down) down ;;
*) usage ;;
esac
