module github.com/stowage-dev/stowage

go 1.26

require github.com/ebitengine/purego v0.11.2 // indirect
