// What stands around the matrix products of scatter matrices: centre and weigh before, compensate after.
#include "block.cuh"

// z = root * (x - pilot), float64; roots may be null. threadIdx.x goes along the columns, so that no thread divides.
template <typename T>
__global__ void __launch_bounds__(256)
    scatter_centre(const T* x, const double* pilot, const double* roots, Index n, Index d, double* z) {
    const Index rows = static_cast<Index>(gridDim.y) * blockDim.y;
    const Index columns = static_cast<Index>(gridDim.x) * blockDim.x;
    for (Index column = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; column < d; column += columns) {
        const double centre = pilot[column];
        for (Index row = static_cast<Index>(blockIdx.y) * blockDim.y + threadIdx.y; row < n; row += rows) {
            const double v = static_cast<double>(x[row * d + column]) - centre;
            z[row * d + column] = roots != nullptr ? v * roots[row] : v;
        }
    }
}

// Add a product to the pairs (high, low): products of many pieces lose nothing against the first.
__global__ void __launch_bounds__(256) scatter_add(const double* product, Index cells, double* high, double* low) {
    const Index threads = static_cast<Index>(gridDim.x) * blockDim.x;
    for (Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; i < cells; i += threads) {
        double h = high[i], l = low[i];
        add_exact(h, l, product[i]);
        high[i] = h;
        low[i] = l;
    }
}
