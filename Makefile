# The commands that people type most. Everything works without make, too.

.PHONY: build test race lint types generate ci gpu-tests library wheel python-test clean

build: ## one binary without cgo, in build/
	CGO_ENABLED=0 go build -trimpath -o build/stowage ./cmd/stowage

test: ## all tests, as in the README
	go test ./...

race: ## under the race detector, which needs cgo
	CGO_ENABLED=1 go test -race -short ./...

lint: ## format, vet and staticcheck
	.ci/run gofmt vet lint

types: ## check the types of the Python package, which needs mypy
	.ci/run types

generate: ## rebuild the kernels, which needs clang-19
	go generate ./internal/kernels/...

PYTHON ?= /usr/bin/python3

library: ## the shared library for PyTorch, which needs cgo
	CGO_ENABLED=1 go build -buildmode=c-shared -trimpath -ldflags='-s -w' -o build/libstowage.so ./pytorch/bridge

wheel: library ## the plug-in for PyTorch in dist/
	$(PYTHON) pytorch/backend.py dist

python-test: library ## the tests of the plug-in, with a PyTorch for CPUs
	$(PYTHON) -m unittest discover -s pytorch/tests

ci: ## everything a change must pass
	.ci/run

# Test binaries for a machine with a GPU, which needs no Go. Tests look for files
# beside their source, so each runs in its package's folder.
gpu-tests: build ## test binaries in build/gpu, for a machine with a GPU
	mkdir -p build/gpu
	CGO_ENABLED=0 go test -c -o build/gpu/cuda.test ./device/cuda
	CGO_ENABLED=0 go test -c -o build/gpu/kernels.test ./internal/kernels
	CGO_ENABLED=0 go test -c -o build/gpu/nn.test ./internal/kernels/nn
	CGO_ENABLED=0 go test -c -o build/gpu/stash.test ./internal/stash
	CGO_ENABLED=0 go test -c -o build/gpu/comm.test ./internal/comm
	CGO_ENABLED=0 go test -c -o build/gpu/offload.test ./internal/offload
	CGO_ENABLED=0 go test -c -o build/gpu/engine.test ./internal/engine
	CGO_ENABLED=0 go test -c -o build/gpu/train.test ./train
	@echo 'On the machine with the GPU, in a copy of this folder:'
	@echo '  (cd device/cuda && ../../build/gpu/cuda.test -test.v)'
	@echo '  (cd internal/kernels && ../../build/gpu/kernels.test -test.v)'
	@echo '  (cd internal/kernels/nn && ../../../build/gpu/nn.test -test.v -test.run OnGPU)'
	@echo '  (cd internal/stash && ../../build/gpu/stash.test -test.v)'
	@echo '  (cd internal/comm && ../../build/gpu/comm.test -test.v -test.run GPU)'
	@echo '  (cd internal/offload && ../../build/gpu/offload.test -test.v)'
	@echo '  (cd internal/engine && ../../build/gpu/engine.test -test.v)'
	@echo '  (cd train && ../build/gpu/train.test -test.v -test.run OnGPU)'

clean:
	rm -rf build dist
