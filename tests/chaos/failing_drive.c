/* Preloaded into a storage node: while the file $CHAOS_DRIVE_FAILS exists, every second read, write and sync of files
 * under the folder $CHAOS_DRIVE fails with EIO. For a node that does its I/O by threads (QUIRE_STORAGE_IO=threads). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int fails(int file) {
    static atomic_uint calls;
    const char *folder = getenv("CHAOS_DRIVE"), *trigger = getenv("CHAOS_DRIVE_FAILS");
    char link[64], path[4096];
    if (folder == NULL || trigger == NULL || access(trigger, F_OK) != 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = '\0';
    if (strncmp(path, folder, strlen(folder)) != 0 || atomic_fetch_add(&calls, 1) % 2 != 0) return 0;
    errno = EIO;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pread(int file, void *to, size_t length, off_t offset) {
    return fails(file) ? -1 : REAL(pread)(file, to, length, offset);
}

ssize_t pread64(int file, void *to, size_t length, off64_t offset) {
    return fails(file) ? -1 : REAL(pread64)(file, to, length, offset);
}

ssize_t pwrite(int file, const void *from, size_t length, off_t offset) {
    return fails(file) ? -1 : REAL(pwrite)(file, from, length, offset);
}

ssize_t pwrite64(int file, const void *from, size_t length, off64_t offset) {
    return fails(file) ? -1 : REAL(pwrite64)(file, from, length, offset);
}

int fdatasync(int file) { return fails(file) ? -1 : REAL(fdatasync)(file); }
