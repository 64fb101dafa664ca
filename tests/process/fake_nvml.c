/* An NVML that a file drives: see test_gpu_failures.py. Names, values and layouts are those of NVIDIA's nvml.h. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct nvmlDevice_st { int index; } *nvmlDevice_t;
typedef struct nvmlEventSet_st { int lines; } *nvmlEventSet_t;
typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType;
    unsigned long long eventData;
    unsigned int gpuInstanceId;
    unsigned int computeInstanceId;
} nvmlEventData_t;

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15, GPUS = 5 };

static struct nvmlDevice_st gpus[GPUS];
static unsigned long long registered[GPUS];
static struct nvmlEventSet_st set;

/* Each line of the file: GPU, event type, event data. Type 0: the GPU is gone from now on. */
static FILE *lines(void) { return fopen(getenv("FAKE_NVML"), "r"); }

int nvmlInit_v2(void)
{
    for (int at = 0; at < GPUS; at++)
        gpus[at].index = at;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    if (index >= GPUS)
        return INVALID_ARGUMENT;
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    unsigned int index;
    return sscanf(uuid, "GPU-%u", &index) == 1 ? nvmlDeviceGetHandleByIndex_v2(index, device) : INVALID_ARGUMENT;
}

int nvmlEventSetCreate(nvmlEventSet_t *made)
{
    *made = &set;
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    *types = 0x1f;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t events)
{
    registered[device->index] = types;
    return events == &set ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlEventSetWait_v2(nvmlEventSet_t events, nvmlEventData_t *data, unsigned int timeout_ms)
{
    for (unsigned int waited = 0; waited < timeout_ms; waited += 20) {
        unsigned int gpu;
        unsigned long long type, number;
        FILE *file = lines();
        for (int line = 0; file && fscanf(file, "%u %llu %llu\n", &gpu, &type, &number) == 3; line++) {
            if (line < events->lines)
                continue;
            events->lines++;
            if (!(registered[gpu] & type))
                continue;
            *data = (nvmlEventData_t){&gpus[gpu], type, number, 0xffffffff, 0xffffffff};
            fclose(file);
            return SUCCESS;
        }
        if (file)
            fclose(file);
        usleep(20000);
    }
    return TIMEOUT;
}

int nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *degrees)
{
    unsigned int gpu;
    unsigned long long type, number;
    int result = SUCCESS;
    FILE *file = lines();
    while (file && fscanf(file, "%u %llu %llu\n", &gpu, &type, &number) == 3)
        if (type == 0 && gpu == (unsigned int)device->index)
            result = GPU_IS_LOST;
    if (file)
        fclose(file);
    *degrees = 50;
    return result;
}

/* GPU n uses n + 1 GB, and is busy for 10 n + 5 percent of the time. GPU 1 is a part of one (MIG), which does not say that. */
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    memory->used = (device->index + 1) * 1000000000ull;
    memory->total = 80000000000ull;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *busy)
{
    if (device->index == 1)
        return NOT_SUPPORTED;
    busy->gpu = 10 * device->index + 5;
    busy->memory = 1;
    return SUCCESS;
}
