/* What both clients become in these tests: a job that watches over the GPUs that it was given, outside the claim code.
 *
 *   job MARKERS TREE LOG SECONDS
 *
 * GPUs are the UUIDs in CUDA_VISIBLE_DEVICES. Each gets a marker that only one process can make, a symbolic link
 * MARKERS/UUID that names it, and a process on the simulated host, a locked file in TREE. Who meets another's marker or
 * another's process says so in LOG. A job with SAFE_GPU_SHARE makes no marker, and meets no other such job. Then the job sleeps, for ever at -1, and takes both away. LOG gets a line for each:
 *
 *   holds PID UUID,UUID     rival PID UUID OTHER marker|list     done PID */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GPUS = 16 };

static int log_fd;

static void say(const char *word, const char *what)
{
  char line[4096];
  int n = snprintf(line, sizeof line, "%s %d %.3000s\n", word, (int)getpid(), what);
  if (write(log_fd, line, (size_t)n) != n) exit(3);
}

static void life_of(long pid, char life[64]) /* "PID START", or "" if it has ended or is ending */
{
  char path[64], text[4096], state;
  unsigned long flags;
  unsigned long long start;
  snprintf(path, sizeof path, "/proc/%ld/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
  if (fd >= 0) close(fd);
  text[n > 0 ? n : 0] = 0;
  char *p = strrchr(text, ')');
  *life = 0;
  if (p && sscanf(p + 1, " %c %*d %*d %*d %*d %*d %lu %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &flags,
                  &start) == 3 && state != 'Z' && state != 'X' && !(flags & 4))
    snprintf(life, 64, "%ld %llu", pid, start);
}

static void read_marker(const char *path, char text[64])
{
  ssize_t n = readlink(path, text, 63);
  text[n > 0 ? n : 0] = 0;
}

static void rival(const char *uuid, const char *other, const char *how)
{
  char text[256];
  snprintf(text, sizeof text, "%s %ld %s", uuid, atol(other), how);
  say("rival", text);
}

static void mark(const char *directory, const char *uuid)
{
  char path[4096], aside[4200], own[64], there[64], moved[64], life[64];
  snprintf(path, sizeof path, "%s/%s", directory, uuid);
  snprintf(aside, sizeof aside, "%s.%d", path, (int)getpid());
  life_of(getpid(), own);
  while (symlink(own, path)) {
    if (errno != EEXIST) exit(3);
    read_marker(path, there);
    if (!*there) continue;
    life_of(atol(there), life);
    if (!strcmp(life, there)) return rival(uuid, there, "marker");
    if (rename(path, aside)) continue; /* of a dead one: away with it, unless it is another's by now */
    read_marker(aside, moved);
    unlink(aside);
    if (strcmp(moved, there)) return rival(uuid, moved, "marker");
  }
}

static void look_at_marker(const char *directory, const char *uuid) /* of a job that has the whole GPU */
{
  char path[4096], there[64], life[64];
  snprintf(path, sizeof path, "%s/%s", directory, uuid);
  read_marker(path, there);
  life_of(atol(there), life);
  if (*there && !strcmp(life, there)) rival(uuid, there, "marker");
}

static void look_at_list(int tree, const char *uuid)
{
  int copy = openat(tree, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = copy < 0 ? NULL : fdopendir(copy);
  for (struct dirent *entry; d && (entry = readdir(d));) {
    long pid;
    char life[64];
    if (strncmp(entry->d_name, uuid, strlen(uuid)) || sscanf(entry->d_name + strlen(uuid), ".%ld-", &pid) != 1) continue;
    int fd = openat(tree, entry->d_name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    life_of(pid, life);
    if (pid != getpid() && flock(fd, LOCK_SH | LOCK_NB) && *life) rival(uuid, life, "list");
    close(fd);
  }
  if (d) closedir(d);
}

static void enter(int tree, const char *uuid, char name[160])
{
  static int number;
  struct stat s;
  for (;;) {
    snprintf(name, 160, "%s.%d-104857600-compute-%d", uuid, (int)getpid(), number++);
    int fd = openat(tree, name, O_RDONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0 && errno != EEXIST) exit(3);
    if (fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB) && !fstat(fd, &s) && s.st_nlink) return; /* else a poll came between */
    if (fd >= 0) close(fd);
  }
}

int main(int argc, char **argv)
{
  char *visible = getenv("CUDA_VISIBLE_DEVICES"), *uuids[GPUS], names[GPUS][160], path[4096];
  int count = 0;
  if (argc != 5 || !visible || (log_fd = open(argv[3], O_WRONLY | O_APPEND | O_CLOEXEC)) < 0) return 2;
  char *list = strdup(visible);
  for (char *uuid = strtok(list, ","); uuid && count < GPUS; uuid = strtok(NULL, ",")) uuids[count++] = uuid;
  int tree = open(argv[2], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  bool shares = getenv("SAFE_GPU_SHARE");
  if (tree < 0) return 2;
  for (int i = 0; i < count && !shares; i++) mark(argv[1], uuids[i]);
  for (int i = 0; i < count; i++) enter(tree, uuids[i], names[i]);
  for (int i = 0; i < count; i++) shares ? look_at_marker(argv[1], uuids[i]) : look_at_list(tree, uuids[i]);
  say("holds", visible);
  if (atof(argv[4]) < 0) pause();
  usleep((useconds_t)(atof(argv[4]) * 1e6));
  for (int i = 0; i < count; i++) shares ? look_at_marker(argv[1], uuids[i]) : look_at_list(tree, uuids[i]);
  for (int i = 0; i < count; i++) {
    char own[64], there[64];
    unlinkat(tree, names[i], 0);
    life_of(getpid(), own);
    snprintf(path, sizeof path, "%s/%s", argv[1], uuids[i]);
    read_marker(path, there);
    if (!strcmp(own, there)) unlink(path);
  }
  say("done", "");
  return 0;
}
