/* Preloaded, it lets a process start MOST_THREADS threads and no more, as a limit on processes does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

static atomic_int started;

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    int (*genuine)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&genuine = dlsym(RTLD_NEXT, "pthread_create");
    if (atomic_fetch_add(&started, 1) >= atoi(getenv("MOST_THREADS")))
        return EAGAIN;
    return genuine(thread, attributes, run, argument);
}
