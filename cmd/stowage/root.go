// This file owns the tree of commands.

package main

import (
	"github.com/spf13/cobra"
)

// flagsTemplate lists the flags in a help text.
const flagsTemplate = `Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}`

// usageTemplate is the part of a help text below its first paragraphs. A command that
// holds others cannot be run itself.
const usageTemplate = `Usage:
  {{if .HasAvailableSubCommands}}{{.CommandPath}} <command>{{else}}{{.UseLine}}{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}

Commands:{{range .Commands}}{{if or .IsAvailableCommand (eq .Name "help")}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

` + flagsTemplate + `{{end}}{{if .HasAvailableSubCommands}}

Use "{{.CommandPath}} <command> --help" for more about a command.{{end}}
`

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "stowage",
		Short: "Train large models in less memory",
		Long: `Stowage trains large models in less device memory. It keeps the activations of a
training step in place, in pages on the accelerator or in host memory, or recomputes
them. It has a trainer, a planner, and a runtime for training loops in Go and PyTorch.
It runs on any CPU, and on NVIDIA GPUs with nothing but their driver.`,
		Example: `  stowage train                 compare the memory policies on a small model
  stowage report runs/compare   make a page of that, or of any run
  stowage plan --help           plan the memory of a large model
  stowage doctor                see what this machine offers and what is missing
  stowage bench offload         measure what offloading saves and costs`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return chooseCommand(cmd, args)
		},
		PersistentPreRunE: checkWords,

		Version:       thisVersion().String(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(flagError)
	root.SetUsageTemplate(usageTemplate)
	root.SetHelpCommand(newHelp(root))
	root.SetVersionTemplate("{{.Version}}\n")
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(newTrain(), newPlan(), newReportCommand(), newDoctor(), newBench(), newCompletion(), newVersion())
	addCompletion(root)
	initHelpFlags(root)
	return root
}

// initHelpFlags gives every command its flag --help now. Cobra does so only once it has
// found the command, and until then takes the word behind -h for its value.
func initHelpFlags(cmd *cobra.Command) {
	cmd.InitDefaultHelpFlag()
	for _, c := range cmd.Commands() {
		initHelpFlags(c)
	}
}

// newHelp returns cobra's help command, except that a wrong topic is an error.
func newHelp(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:     "help [command]",
		Short:   "Show how to use a command",
		Example: "  stowage help bench copy",
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) (names []string, _ cobra.ShellCompDirective) {
			target, _, err := root.Find(args)
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			for _, c := range target.Commands() {
				if c.IsAvailableCommand() {
					names = append(names, c.Name()+"\t"+c.Short)
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			target, rest, err := root.Find(args)
			if err != nil {
				return err
			}
			if len(rest) > 0 {
				return chooseCommand(target, rest)
			}
			target.InitDefaultHelpFlag()
			return target.Help()
		},
	}
}

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "bench",
		Short:   "Measure this machine, and keep the results",
		Long:    "Measure this machine through the same device that training uses. \"bench record\" keeps\nresults by date and compares them.",
		Example: "  stowage bench copy\n  stowage bench stash\n  stowage bench offload\n  stowage bench pools\n  stowage bench copy --json | stowage bench record -",
		Args:    cobra.ArbitraryArgs,
		RunE:    chooseCommand,
	}
	cmd.AddCommand(newBenchCopy(), newBenchStash(), newBenchOffload(), newBenchPools(), newBenchRecord())
	return cmd
}
