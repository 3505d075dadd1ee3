# A Debian 12 with python3, python3-venv and git and nothing else, and commands run in it. For .ci/run, as root.
# Packages come from where this machine's apt and pip get theirs.

# make_debian DIR [SUITE]: a Debian, 12 unless another is named, with a user named someone besides root.
make_debian() {
  local mirror
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' 'Origin: Debian' 'Component: main' | sed -n 1p)
  debootstrap --variant=minbase --include=python3,python3-venv,git,ca-certificates "${2:-bookworm}" "$1" ${mirror:+"$mirror"} \
    >"$1.log" 2>&1 || { tail -n 30 "$1.log" >&2; return 1; }
  chroot "$1" useradd --create-home someone
}

# in_debian DIR HOST USER COMMAND: run a shell command in a fresh clone of this repository, at USER's home. HOST is
# what surrounds it, and the clone's name:
#   machine    a terminal, /proc, /sys (read-only), /dev/pts, every CPU
#   container  a PID namespace, one CPU; no terminal, no /sys, no /dev/pts
# Its temporary directory is named after HOST: abstract sockets are named after paths, and the Debians share them.
in_debian() {
  local root=$1 host=$2 user=$3 command=$4 home surroundings start settings paths
  local shell='exec bash -euxc "$COMMAND"'
  home=$(chroot "$root" getent passwd "$user" | cut -d: -f6)
  git clone -q --no-hardlinks . "$root$home/$host"
  chroot "$root" chown -R "$user:" "$home/$host"
  if [ "$host" = machine ]; then
    surroundings=(unshare --mount)
    start=(script --quiet --return --command "$shell" /dev/null)
  else
    surroundings=(setsid --wait taskset --cpu-list "$(one_cpu)" unshare --mount --pid --fork --kill-child)
    start=(sh -c "$shell")
  fi
  mapfile -t settings < <(pip_settings)
  mapfile -t paths < <(pip_paths)
  export -f mount_debian
  "${surroundings[@]}" bash -euc 'mount_debian "${@:2:$1}"; shift "$1"; exec chroot "${@:2}"' bash $((2 + ${#paths[@]})) \
    "$root" "$host" "${paths[@]}" \
    --userspec="$user:" "$root" env -i --chdir="$home/$host" HOME="$home" TMPDIR="/tmp/$host" USER="$user" SHELL=/bin/bash TERM=dumb \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "${settings[@]}" COMMAND="$command" "${start[@]}" \
    </dev/null
}

# mount_debian DIR HOST PATH...: what a Debian needs besides its files, and these paths of this machine.
mount_debian() {
  local root=$1 host=$2 path
  for path in "${@:3}"; do
    if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root${path%/*}" && touch "$root$path"; fi
    mount --bind "$path" "$root$path"
  done
  mount -t tmpfs tmpfs "$root/tmp"
  mkdir -m 1777 "$root/tmp/$host"
  mount -t tmpfs tmpfs "$root/dev/shm"
  mount -t proc proc "$root/proc"
  if [ "$host" = machine ]; then
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t devpts -o ptmxmode=666 devpts "$root/dev/pts"
  fi
}

one_cpu() { taskset --cpu-list --pid $$ | sed -E 's/.*: ([0-9]+).*/\1/'; }

# What pip is set to here, by files and by variables, as variables.
pip_settings() {
  local name value
  .venv/bin/pip config list | sed -nE "s/^(global|install)\.([a-z-]+)='(.*)'\$/\2 \3/p" | while read -r name value; do
    name=${name^^}
    printf 'PIP_%s=%s\n' "${name//-/_}" "${value//'\n'/ }"
  done
  env | grep -iE '^(pip_|https?_proxy=|no_proxy=)' || true
}

# Files and directories of this machine that pip's settings name. An index keeps its files beside its pages.
pip_paths() {
  local word
  for word in $(pip_settings | cut -d= -f2-); do
    word=${word#file://} word=${word%/} word=${word%/simple}
    if [[ $word == /* && -e $word ]]; then printf '%s\n' "$word"; fi
  done | sort -u
}
