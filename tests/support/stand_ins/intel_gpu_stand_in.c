/* A processor passed off as a GPU of Intel: a stand-in for hardware that is not there.
 *
 * Intel's OpenCL for processors runs the kernels of OpenVINO's GPU plugin, with three differences that this mends. It
 * is preloaded, in front of the OpenCL loader:
 *
 * - The device says that it is a processor. Here it says that it is an integrated GPU of the twelfth generation (Xe-LP),
 *   which has no matrix units: for those the plugin has kernels in machine code.
 * - Sub-groups lie along the first axis of a work group only, and have one member where that axis has. On a GPU they
 *   lie along the first axis that has more. So such a kernel is run with two axes exchanged, in its source and in its
 *   sizes.
 * - A program is gone when it is released, though its kernels are not. So nothing is released.
 *
 * What runs are the plugin's own graphs and OpenCL kernels. Times say nothing, and nothing here checks memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICE_TYPE = 0x1000, IP_VERSION = 0x4250, FEATURES = 0x4256, FUNCTION_NAME = 0x1190 };
enum { INVALID_VALUE = -30, ARGUMENTS = 128, NAME = 512 };

/* The library's own function of that name. */
#define OWN(result, name, ...) \
    static result (*own)(__VA_ARGS__); \
    if (!own) own = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static void stop(const char *what, int code) {
    fprintf(stderr, "intel_gpu_stand_in: %s: %d\n", what, code);
    abort();
}

/* ---- the device ---- */

static int answer(const void *value, size_t bytes, size_t room, void *out, size_t *size) {
    if (size) *size = bytes;
    if (!out) return 0;
    if (room < bytes) return INVALID_VALUE;
    memcpy(out, value, bytes);
    return 0;
}

int clGetDeviceInfo(void *device, unsigned what, size_t room, void *out, size_t *size) {
    OWN(int, clGetDeviceInfo, void *, unsigned, size_t, void *, size_t *);
    const uint64_t gpu = 4, no_features = 0;
    /* Version 12.0, a device identifier of that generation, slices, sub-slices, units, threads. */
    const uint32_t facts[] = {12u << 22, 0x9a49, 1, 6, 16, 7};
    if (what == DEVICE_TYPE) return answer(&gpu, sizeof gpu, room, out, size);
    if (what == FEATURES) return answer(&no_features, sizeof no_features, room, out, size);
    if (what >= IP_VERSION && what < FEATURES) return answer(&facts[what - IP_VERSION], 4, room, out, size);
    return own(device, what, room, out, size);
}

/* ---- programs and kernels, and what they were made with ---- */

typedef struct Program {
    void *handle, *context, *device;
    char *source, *options;
    void *exchanged[3]; /* The same program with the first axis exchanged for this one. */
    struct Program *next;
} Program;

typedef struct {
    int by_pointer;
    size_t bytes;
    void *value; /* NULL is local memory of so many bytes. */
} Argument;

typedef struct Kernel {
    void *handle;
    Program *program;
    char name[NAME];
    void *exchanged[3];
    Argument arguments[ARGUMENTS];
    int count;
    struct Kernel *next;
} Kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Program *programs;
static Kernel *kernels[1 << 16];

static Kernel **bucket(void *handle) { return &kernels[((uintptr_t)handle >> 3) & 0xffff]; }

static Program *program_of(void *handle) {
    Program *found = programs;
    while (found && found->handle != handle) found = found->next;
    return found;
}

static Kernel *kernel_of(void *handle) {
    Kernel *found = *bucket(handle);
    while (found && found->handle != handle) found = found->next;
    return found;
}

static Kernel *remember(void *handle, const Kernel *like) {
    Kernel *kernel = calloc(1, sizeof *kernel);
    if (like) *kernel = *like;
    kernel->handle = handle;
    memset(kernel->exchanged, 0, sizeof kernel->exchanged);
    for (int i = 0; i < kernel->count; i++) {
        Argument *argument = &kernel->arguments[i];
        if (argument->value) argument->value = memcpy(malloc(argument->bytes), argument->value, argument->bytes);
    }
    kernel->next = *bucket(handle);
    return *bucket(handle) = kernel;
}

void *clCreateProgramWithSource(void *context, unsigned count, const char **texts, const size_t *sizes, int *error) {
    OWN(void *, clCreateProgramWithSource, void *, unsigned, const char **, const size_t *, int *);
    Program *program = calloc(1, sizeof *program);
    size_t length = 0;
    for (unsigned i = 0; i < count; i++) {
        size_t more = sizes && sizes[i] ? sizes[i] : strlen(texts[i]);
        program->source = realloc(program->source, length + more + 1);
        memcpy(program->source + length, texts[i], more);
        program->source[length += more] = 0;
    }
    program->context = context;
    program->handle = own(context, count, texts, sizes, error);
    pthread_mutex_lock(&lock);
    program->next = programs;
    programs = program;
    pthread_mutex_unlock(&lock);
    return program->handle;
}

int clBuildProgram(void *handle, unsigned count, void **devices, const char *options, void *notify, void *data) {
    OWN(int, clBuildProgram, void *, unsigned, void **, const char *, void *, void *);
    pthread_mutex_lock(&lock);
    Program *program = program_of(handle);
    if (program) {
        program->device = count ? devices[0] : NULL;
        program->options = strdup(options ? options : "");
    }
    pthread_mutex_unlock(&lock);
    return own(handle, count, devices, options, notify, data);
}

static void made(void *handle, void *program) {
    OWN(int, clGetKernelInfo, void *, unsigned, size_t, void *, size_t *);
    pthread_mutex_lock(&lock);
    Kernel *kernel = remember(handle, NULL);
    kernel->program = program_of(program);
    pthread_mutex_unlock(&lock);
    int error = own(handle, FUNCTION_NAME, NAME, kernel->name, NULL);
    if (error) stop("the name of a kernel", error);
}

int clCreateKernelsInProgram(void *program, unsigned count, void **handles, unsigned *found) {
    OWN(int, clCreateKernelsInProgram, void *, unsigned, void **, unsigned *);
    int error = own(program, count, handles, found);
    for (unsigned i = 0; !error && handles && i < count; i++) made(handles[i], program);
    return error;
}

void *clCreateKernel(void *program, const char *name, int *error) {
    OWN(void *, clCreateKernel, void *, const char *, int *);
    void *handle = own(program, name, error);
    if (handle) made(handle, program);
    return handle;
}

void *clCloneKernel(void *handle, int *error) {
    OWN(void *, clCloneKernel, void *, int *);
    void *clone = own(handle, error);
    pthread_mutex_lock(&lock);
    if (clone) remember(clone, kernel_of(handle));
    pthread_mutex_unlock(&lock);
    return clone;
}

int clReleaseProgram(void *handle) { return (void)handle, 0; }
int clReleaseKernel(void *handle) { return (void)handle, 0; }

/* ---- arguments ---- */

static int (*set_pointer)(void *, unsigned, const void *);

static void given(void *handle, unsigned place, int by_pointer, size_t bytes, const void *value) {
    pthread_mutex_lock(&lock);
    Kernel *kernel = kernel_of(handle);
    if (place >= ARGUMENTS) stop("more arguments than there is room for", (int)place);
    if (kernel) {
        Argument *argument = &kernel->arguments[place];
        free(argument->value);
        *argument = (Argument){by_pointer, bytes, value ? memcpy(malloc(bytes), value, bytes) : NULL};
        if (kernel->count <= (int)place) kernel->count = (int)place + 1;
    }
    pthread_mutex_unlock(&lock);
}

int clSetKernelArg(void *handle, unsigned place, size_t bytes, const void *value) {
    OWN(int, clSetKernelArg, void *, unsigned, size_t, const void *);
    given(handle, place, 0, bytes, value);
    return own(handle, place, bytes, value);
}

static int given_pointer(void *handle, unsigned place, const void *pointer) {
    given(handle, place, 1, sizeof pointer, &pointer);
    return set_pointer(handle, place, pointer);
}

void *clGetExtensionFunctionAddressForPlatform(void *platform, const char *name) {
    OWN(void *, clGetExtensionFunctionAddressForPlatform, void *, const char *);
    void *found = own(platform, name);
    if (!found || strcmp(name, "clSetKernelArgMemPointerINTEL")) return found;
    set_pointer = (int (*)(void *, unsigned, const void *))found;
    return (void *)given_pointer;
}

/* ---- kernels whose first axis is exchanged ---- */

static const char *const EXCHANGED =
    "#define EXCHANGED(d) ((d) == 0 ? %d : (d) == %d ? 0 : (d))\n"
    "#define get_global_id(d) get_global_id(EXCHANGED(d))\n"
    "#define get_global_size(d) get_global_size(EXCHANGED(d))\n"
    "#define get_global_offset(d) get_global_offset(EXCHANGED(d))\n"
    "#define get_local_id(d) get_local_id(EXCHANGED(d))\n"
    "#define get_local_size(d) get_local_size(EXCHANGED(d))\n"
    "#define get_enqueued_local_size(d) get_enqueued_local_size(EXCHANGED(d))\n"
    "#define get_group_id(d) get_group_id(EXCHANGED(d))\n"
    "#define get_num_groups(d) get_num_groups(EXCHANGED(d))\n"
    "#define reqd_work_group_size(x, y, z) reqd_work_group_size(%s)\n";

static void exchange(Program *program, int axis) {
    static void *(*create)(void *, unsigned, const char **, const size_t *, int *);
    static int (*build)(void *, unsigned, void **, const char *, void *, void *);
    if (!create) *(void **)&create = dlsym(RTLD_NEXT, "clCreateProgramWithSource");
    if (!build) *(void **)&build = dlsym(RTLD_NEXT, "clBuildProgram");
    char head[2048];
    snprintf(head, sizeof head, EXCHANGED, axis, axis, axis == 2 ? "z, y, x" : "y, x, z");
    const char *texts[] = {head, program->source};
    int error;
    program->exchanged[axis] = create(program->context, 2, texts, NULL, &error);
    if (!error) error = build(program->exchanged[axis], 1, &program->device, program->options, NULL, NULL);
    if (error) stop("a program with its axes exchanged", error);
}

static void *with_axis(Kernel *kernel, int axis) {
    static void *(*create)(void *, const char *, int *);
    static int (*set)(void *, unsigned, size_t, const void *);
    if (!create) *(void **)&create = dlsym(RTLD_NEXT, "clCreateKernel");
    if (!set) *(void **)&set = dlsym(RTLD_NEXT, "clSetKernelArg");
    int error = 0;
    if (!kernel->program->exchanged[axis]) exchange(kernel->program, axis);
    if (!kernel->exchanged[axis])
        kernel->exchanged[axis] = create(kernel->program->exchanged[axis], kernel->name, &error);
    for (int i = 0; !error && i < kernel->count; i++) {
        const Argument *argument = &kernel->arguments[i];
        if (argument->by_pointer) error = set_pointer(kernel->exchanged[axis], i, *(void **)argument->value);
        else if (argument->bytes) error = set(kernel->exchanged[axis], i, argument->bytes, argument->value);
    }
    if (error) stop(kernel->name, error);
    return kernel->exchanged[axis];
}

int clEnqueueNDRangeKernel(
    void *queue, void *handle, unsigned axes, const size_t *offset, const size_t *global, const size_t *local,
    unsigned waits, const void *events, void *event) {
    OWN(int, clEnqueueNDRangeKernel, void *, void *, unsigned, const size_t *, const size_t *, const size_t *, unsigned,
        const void *, void *);
    int axis = axes < 3 || !local || local[0] > 1 ? 0 : local[1] > 1 ? 1 : local[2] > 1 ? 2 : 0;
    if (!axis || offset) return own(queue, handle, axes, offset, global, local, waits, events, event);
    pthread_mutex_lock(&lock);
    Kernel *kernel = kernel_of(handle);
    if (!kernel || !kernel->program) stop("a kernel of unknown source", axis);
    size_t all[3], group[3];
    for (int i = 0; i < 3; i++) {
        int from = i == 0 ? axis : i == axis ? 0 : i;
        all[i] = global[from], group[i] = local[from];
    }
    int error = own(queue, with_axis(kernel, axis), 3, NULL, all, group, waits, events, event);
    pthread_mutex_unlock(&lock);
    return error;
}
