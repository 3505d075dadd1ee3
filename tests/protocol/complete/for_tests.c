/* The client of client.c on a simulated host, and with claims inside claims. The simulated host is that of
 * SAFE_GPU_DRIVER=simulated:PRESET, as for the package.
 *
 *   cc -std=c11 -o client for_tests.c
 *   client [-i] ...
 *
 * -i: claims inside this one are allowed. The rest is as in client.c. */
#define main main_of_client
#include "client.c"
#undef main

/* ---- SHA-256, of which the protocol uses the first 16 hexadecimal digits ---- */

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void hash16(const char *text, char out[17])
{
  static const uint32_t k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
    0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
    0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
    0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2};
  uint32_t h[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  size_t length = strlen(text), blocks = (length + 8) / 64 + 1;
  for (size_t block = 0; block < blocks; block++) {
    uint32_t w[64] = {0}, s[8];
    for (size_t i = 0; i < 64; i++) {
      size_t at = block * 64 + i;
      uint64_t byte = at < length ? (unsigned char)text[at] : at == length ? 0x80 : 0;
      if (at >= blocks * 64 - 8) byte = (uint64_t)length * 8 >> 8 * (blocks * 64 - 1 - at) & 0xff;
      w[i / 4] |= (uint32_t)byte << (24 - 8 * (i % 4));
    }
    for (int i = 16; i < 64; i++)
      w[i] = w[i - 16] + w[i - 7] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
             (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(s, h, sizeof s);
    for (int i = 0; i < 64; i++) {
      uint32_t a = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) + ((s[4] & s[5]) ^ (~s[4] & s[6])) +
                   k[i] + w[i];
      uint32_t b = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) +
                   ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      memmove(s + 1, s, 7 * sizeof *s);
      s[4] += a;
      s[0] = a + b;
    }
    for (int i = 0; i < 8; i++) h[i] += s[i];
  }
  put(out, 17, "%08x%08x", h[0], h[1]);
}

/* ---- Claims inside claims ---- */

static char token[17];              /* of this claim; "": it allows none inside it */
static char *scope;                 /* the token of the enclosing claim; NULL: there is none */
static bool enclosing_has_no_doors; /* it had no sockets */

static void tail_of_token(const char *of, char tail[17])
{
  char both[64];
  put(both, sizeof both, "%s.door", of);
  hash16(both, tail);
}

static bool token_is_held(const struct gpu *gpu)
{
  char tail[17];
  tail_of_token(scope, tail);
  return is_held(door("%s.%s.0", gpu->uuid, tail)) && is_held(door("%s.%s.1", gpu->uuid, tail));
}

static bool is_inside(const struct entry *enclosing, int i) /* whether it has this GPU, and is there still */
{
  if (enclosing->taken[i] != ALL) return false;
  enclosing_has_no_doors = without_doors || enclosing->part[i][0] < 0;
  return enclosing_has_no_doors || (!has_ended(enclosing) && token_is_held(&gpus[i]));
}

static int close_others(const struct entry *enclosing) /* GPUs than its own, to this claim; how many it has */
{
  int count = 0;
  for (int i = 0; i < gpu_count; i++) {
    gpus[i].is_closed = !enclosing || !is_inside(enclosing, i);
    count += !gpus[i].is_closed;
  }
  return count;
}

static const struct entry *find_enclosing(void)
{
  char hash[17];
  hash16(scope, hash);
  for (const struct entry *e = claims.living; e < claims.living + claims.living_count; e++)
    if (encloses(e, hash, geteuid())) return e;
  return NULL;
}

static void look_at_enclosing_claim(void)
{
  const struct entry *enclosing = scope ? find_enclosing() : NULL;
  int count = scope ? close_others(enclosing) : 0;
  if (claims.own >= 0) return; /* a claim that has been made withdraws if the enclosing one has ended */
  *inside = 0;
  pid_of_enclosing = 0;
  if (scope && !count) {
    fputs("client: warning: SAFE_GPU_SCOPE is of no living claim of these GPUs, and is ignored\n", stderr);
    unsetenv("SAFE_GPU_SCOPE");
    scope = NULL;
    remove_entry(&queue); /* it was for GPUs inside */
    read_closed();
  }
  if (scope) {
    if (count < wanted || share) die(75, "the enclosing claim has %d of these GPUs, and whole ones", count);
    put(inside, sizeof inside, "%s", enclosing->token);
    pid_of_enclosing = (long)enclosing->pid;
    *token_hash = 0;
  } else if (*token) {
    hash16(token, token_hash);
    setenv("SAFE_GPU_SCOPE", token, 1);
  }
}

static bool take_doors_for_tests(int i, int name)
{
  char tail[17];
  struct gpu *gpu = &gpus[i];
  const char *uuid = name_of(gpu, name);
  if (*inside && enclosing_has_no_doors) return true;
  if (*inside) return take_part(gpu, name, parts_of_entries(i, name)) && token_is_held(gpu);
  if (!*token) return take_all_or_share(i, name);
  tail_of_token(token, tail);
  return take_door(gpu, door("%s.%s.0", uuid, tail)) && take_all(gpu, name) && take_part(gpu, name, 0) &&
         take_door(gpu, door("%s.%s.1", uuid, tail));
}

/* ---- The driver of a simulated host ---- */

static const char *preset;
static char simulated[4200]; /* the directory of simulated hosts */

/* Whether a device is gone, by the file that says how its card is divided: "whole", "mig ...", "partitions N" or
 * "functions N". Without one the card is whole. */
static bool is_gone(const struct gpu *gpu)
{
  char path[4500], line[256] = "whole";
  const char *mode = "";
  put(path, sizeof path, "%s/%s/%s.mode", simulated, preset, gpu->whole);
  FILE *file = fopen(path, "re");
  if (file && !fgets(line, sizeof line, file)) *line = 0;
  if (file) fclose(file);
  if (!strncmp(line, "functions", 9)) return false;
  if (!strncmp(line, "partitions 2", 12)) mode = "DPX";
  if (!strncmp(line, "partitions 4", 12)) mode = "QPX";
  if (!strncmp(line, "partitions 8", 12)) mode = "CPX";
  bool is_whole = !strncmp(line, "whole", 5);
  return gpu->is_piece == is_whole || strcmp(gpu->mode, mode);
}

static void note_process(const char *uuid, long pid)
{
  for (int i = 0; i < gpu_count; i++)
    if (!strcmp(gpus[i].uuid, uuid) && gpus[i].pid_count < MOST_PIDS) gpus[i].pids[gpus[i].pid_count++] = pid;
}

static void poll_simulated_host(void) /* a process is a file UUID.PID-BYTES-KIND-NUMBER that it keeps locked */
{
  char path[4500], kind[16];
  long pid;
  for (int i = 0; i < gpu_count; i++) {
    gpus[i].is_gone = is_gone(&gpus[i]);
    gpus[i].pid_count = 0;
  }
  put(path, sizeof path, "%s/%s", simulated, preset);
  DIR *directory = opendir(path);
  for (struct dirent *one; directory && (one = readdir(directory));) {
    char *dot = strrchr(one->d_name, '.');
    if (!dot || sscanf(dot, ".%ld-%*d-%15[a-z]-", &pid, kind) != 2 || !strcmp(kind, "graphics")) continue;
    int fd = openat(dirfd(directory), one->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    bool is_alive = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB);
    close_fd(&fd);
    *dot = 0;
    if (is_alive) note_process(one->d_name, pid);
  }
  if (directory) closedir(directory);
}

static void simulate(void)
{
  const char *driver = getenv("SAFE_GPU_DRIVER"), *hosts = getenv("SAFE_GPU_SIMULATED_DIR");
  const char *state = getenv("SAFE_GPU_DIR");
  char hash[17];
  if (!driver || strncmp(driver, "simulated:", 10)) return;
  preset = driver + 10;
  if (hosts && *hosts) put(simulated, sizeof simulated, "%s", hosts);
  else put(simulated, sizeof simulated, "%s/simulated", state && *state ? state : "/tmp/safe-gpu");
  hash16(simulated, hash);
  put(door_prefix, sizeof door_prefix, "sim-%s/", hash);
  poll_driver = poll_simulated_host;
}

int main(int argc, char **argv)
{
  const char *given = getenv("SAFE_GPU_SCOPE");
  bool allows_inside = argc > 1 && !strcmp(argv[1], "-i");
  if (given && *given) scope = strdup(given);
  if (allows_inside) random_digits(token);
  look_at_enclosing = look_at_enclosing_claim;
  take_doors_of_name = take_doors_for_tests;
  simulate();
  return main_of_client(argc - allows_inside, argv + allows_inside);
}
